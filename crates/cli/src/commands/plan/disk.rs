//! Whether a run's checkpoints find room.

use longdraft_models::disk::{free_bytes, readable_bytes};
use longdraft_train::stage::Stage;

use crate::commands::runs::size_below;
use crate::ranks::Voice;

/// Bytes of a parameter in a checkpoint: its weight and the optimizer's two moments, in f32.
const BYTES: u64 = 12;

/// Warns where the disk has less room than a run's checkpoints take at most: `last`, `last_2`, with held-out rows
/// `best`, and one that is being written.
pub(super) fn say(voice: &Voice, stage: &Stage) {
    let output = &stage.config().output;
    let (_, _, held_out) = stage.data_sizes();
    let count = if held_out > 0 { 4 } else { 3 };
    let wanted = count * BYTES * stage.objective().draft().parameter_count() as u64;
    let (there, _) = size_below(&output.join("checkpoints"));
    let Some(free) = free_bytes(output).filter(|free| free + there < wanted) else { return };
    voice.say(&format!(
        "warning: checkpoints take up to {}, and {} are free at {}: make room, or give a folder on another disk with \
         output=DIR",
        readable_bytes(wanted.saturating_sub(there)),
        readable_bytes(free),
        output.display()
    ));
}
