//! What ranks do together comes to what one process does.

mod devices;
mod targets;
mod tensor;
