//! Whether a run's checkpoints find room.

use longdraft_models::disk::{free_bytes, readable_bytes};
use longdraft_train::stage::Stage;

use crate::commands::runs::size_below;
use crate::ranks::Voice;

/// Bytes of a parameter in a checkpoint: its weight and the optimizer's two moments, in f32.
const BYTES: u64 = 12;

/// Warns where the disk has less room than a run's checkpoints take at most: `last`, `last_2`, with held-out rows
/// `best`, and one that is being written. A finished run writes none.
pub(super) fn say(voice: &Voice, stage: &Stage) {
    if stage.is_finished() {
        return;
    }
    let (config, draft) = (stage.config(), stage.objective().draft());
    let output = &config.output;
    let (_, _, held_out) = stage.data_sizes();
    let count = if held_out > 0 && config.train.keep_best { 4 } else { 3 };
    let fixed = draft.fixed_tensors().unwrap_or_default();
    let fixed = fixed
        .iter()
        .map(|(_, tensor)| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64);
    let wanted = count * (BYTES * draft.parameter_count() as u64 + fixed.sum::<u64>());
    let (there, _) = size_below(&output.join("checkpoints"));
    let more = wanted.saturating_sub(there);
    let Some(free) = free_bytes(output).filter(|free| *free < more) else { return };
    voice.say(&format!(
        "warning: checkpoints may take {} more, and {} are free at {}: make room, or give a folder on another disk with \
         output=DIR",
        readable_bytes(more),
        readable_bytes(free),
        output.display()
    ));
}
