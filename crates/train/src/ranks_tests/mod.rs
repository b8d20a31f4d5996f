//! What ranks do together comes to what one process does.

mod devices;
mod measured;
mod targets;
mod tensor;
