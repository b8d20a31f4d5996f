//! Every kind of input, and the product's reader of it.

pub(crate) mod blocks;
mod configuration;
mod data;
mod models;
mod serving;
mod text;
mod training;
mod weights;

pub(crate) use serving::other_export_configs;
pub(crate) use text::sentence_piece_model;

/// A kind of input.
#[derive(Debug, Clone, Copy)]
pub struct Reader {
    /// Names the kind on command lines and in `seeds/`.
    pub name: &'static str,
    read: fn(&[u8]) -> bool,
    /// Small inputs that are accepted, from the product's own writers where it has some.
    pub valid: fn() -> Vec<Vec<u8>>,
    /// Bytes of the longest input that a fuzzer makes.
    pub longest: usize,
}

impl Reader {
    /// Reads an input, and says whether it was accepted.
    pub fn accepts(&self, bytes: &[u8]) -> bool {
        crate::allow_memory();
        (self.read)(bytes)
    }
}

const KIB: usize = 1 << 10;

/// Declares readers: name, function, what makes valid inputs, longest input.
macro_rules! readers {
    ($($module:ident :: $read:ident ($valid:ident), $longest:expr;)*) => {
        &[$(Reader {
            name: stringify!($read),
            read: $module::$read,
            valid: $module::$valid,
            longest: $longest,
        },)*]
    };
}

/// All of them.
pub const READERS: &[Reader] = readers! {
    weights::safetensors(safetensors_files), 4 * KIB;
    weights::shard_index(shard_indices), 2 * KIB;
    weights::gguf(gguf_files), 40 * KIB;
    weights::gguf_draft(gguf_drafts), 16 * KIB;
    weights::pth(pth_files), 8 * KIB;
    weights::pickle(pickles), 4 * KIB;
    weights::artifact(artifacts), 16 * KIB;
    models::target_config(target_configs), 2 * KIB;
    models::hybrid_config(hybrid_configs), 2 * KIB;
    models::eagle3_config(eagle3_configs), 4 * KIB;
    models::glide_config(glide_configs), 2 * KIB;
    models::language_model_config(language_model_configs), 4 * KIB;
    text::tokenizer_json(tokenizer_files), 8 * KIB;
    text::tokenizer_config(tokenizer_configs), 2 * KIB;
    text::sentence_piece(sentence_piece_models), 4 * KIB;
    text::chat_template(chat_templates), 2 * KIB;
    configuration::configuration(configurations), 4 * KIB;
    data::jsonl(jsonl_files), 4 * KIB;
    data::json(json_files), 4 * KIB;
    data::compressed_rows(compressed_files), 4 * KIB;
    data::parquet(parquet_files), 4 * KIB;
    data::arrow(arrow_files), 4 * KIB;
    data::token_stream(token_streams), 4 * KIB;
    data::data_shard(data_shards), 2 * KIB;
    data::data_index(data_indices), 2 * KIB;
    training::feature_shard(feature_shards), 8 * KIB;
    training::feature_index(feature_indices), 4 * KIB;
    training::feature_record(feature_records), 8 * KIB;
    training::engine_record(engine_records), 8 * KIB;
    training::cache_manifest(cache_manifests), 2 * KIB;
    training::cache_index(cache_indices), 2 * KIB;
    training::checkpoint_state(checkpoint_states), 4 * KIB;
    training::checkpoint_manifest(checkpoint_manifests), 2 * KIB;
    training::checkpoint_optimizer(checkpoint_optimizers), 64 * KIB;
    training::token_counts(token_count_files), 2 * KIB;
    serving::export_manifest(export_manifests), 8 * KIB;
    serving::export_config(export_configs), 4 * KIB;
    serving::export_weights(export_weights_files), 64 * KIB;
    serving::hub_answers(hub_conversations), 4 * KIB;
};
