//! Argument structs of kernels: defined once, for the host and for the kernel text.

/// A type that may stand in an argument struct: `u32`, `f32`, another argument struct, an array of these.
pub trait Field: bytemuck::Pod {
    /// Declares a member `name` of this type in the kernel text.
    fn declare(name: &str) -> String;
}

impl Field for u32 {
    fn declare(name: &str) -> String {
        format!("uint {name};")
    }
}

impl Field for f32 {
    fn declare(name: &str) -> String {
        format!("float {name};")
    }
}

impl<T: Field, const N: usize> Field for [T; N]
where
    [T; N]: bytemuck::Pod,
{
    fn declare(name: &str) -> String {
        T::declare(&format!("{name}[{N}]"))
    }
}

/// A struct that a kernel takes as its last argument, by value.
pub trait KernelArgs: bytemuck::Pod {
    /// Its name in the kernel text.
    const NAME: &'static str;
    /// Its declaration in the kernel text.
    fn declaration() -> String;
}

/// Declares argument structs: `#[repr(C)]`, only `u32`, `f32`, other argument structs and arrays of
/// these, so that the host's layout is every compiler's. Also makes `declarations()`, the text of all of
/// them in order.
#[macro_export]
macro_rules! kernel_args {
    ($($(#[$doc:meta])* $vis:vis struct $name:ident { $($(#[$field_doc:meta])* $field:ident : $type:ty),+ $(,)? })+) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
            $vis struct $name { $($(#[$field_doc])* pub $field: $type),+ }

            impl $crate::args::KernelArgs for $name {
                const NAME: &'static str = stringify!($name);
                fn declaration() -> String {
                    let mut text = String::from(concat!("struct ", stringify!($name), " {"));
                    $(
                        text.push(' ');
                        text.push_str(&<$type as $crate::args::Field>::declare(stringify!($field)));
                    )+
                    text + " };\n"
                }
            }

            impl $crate::args::Field for $name {
                fn declare(name: &str) -> String {
                    format!(concat!(stringify!($name), " {};"), name)
                }
            }
        )+

        /// The kernel text of these argument structs, in order.
        #[allow(dead_code)] // structs of a test need no text
        pub fn declarations() -> String {
            [$(<$name as $crate::args::KernelArgs>::declaration()),+].concat()
        }
    };
}

#[cfg(test)]
mod tests {
    use super::KernelArgs;

    kernel_args! {
        /// Inner.
        pub struct Inner { a: u32, b: f32 }
        /// Outer.
        pub struct Outer { n: u32, list: [Inner; 2], x: [f32; 3] }
    }

    #[test]
    fn one_definition_gives_both_texts() {
        assert_eq!(
            declarations(),
            "struct Inner { uint a; float b; };\n\
             struct Outer { uint n; Inner list[2]; float x[3]; };\n"
        );
        assert_eq!((Outer::NAME, size_of::<Outer>()), ("Outer", 4 + 16 + 12));
    }
}
