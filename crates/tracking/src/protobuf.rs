//! Messages of protobuf files as tables.

/// Structs of messages. A field's row is what `prost` is told of its form, its name and its type.
macro_rules! messages {
    ($(
        $(#[$about:meta])*
        $name:ident { $( $(#[$note:meta])* [$($form:tt)+] $field:ident: $type:ty, )* }
    )*) => {$(
        $(#[$about])*
        #[derive(Clone, PartialEq, prost::Message)]
        pub(super) struct $name {
            $( $(#[$note])* #[prost($($form)+)] pub(super) $field: $type, )*
        }
    )*};
}

pub(crate) use messages;
