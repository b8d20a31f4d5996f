//! What ranks do together comes to what one process does.

mod targets;
mod tensor;
