#!/bin/sh
# RUSTC_WRAPPER for building the Metal host code where there is no Metal: all crates as they are, but objc2-metal from a copy
# whose one link attribute (`#[link(name = "Metal", kind = "framework")]`, an error on other targets) is for Apple's alone.
# Cargo.lock stays as it is.
rustc=$1
shift
i=0
n=$#
while [ $i -lt "$n" ]; do
    a=$1
    shift
    case "$a" in
        */objc2-metal-*/src/lib.rs | objc2-metal-*/src/lib.rs)
            to=${CARGO_TARGET_DIR:-target}/objc2-metal
            case "$a" in /*) from=$(dirname "$(dirname "$a")") ;; *) from=$(pwd)/$(dirname "$(dirname "$a")") ;; esac
            rm -rf "$to.new$$"
            mkdir -p "$to.new$$"
            cp -r "$from/src" "$to.new$$/"
            sed -i 's|^#\[link(name = "Metal", kind = "framework")\]|#[cfg_attr(target_vendor = "apple", link(name = "Metal", kind = "framework"))]|' \
                "$to.new$$/src/generated/mod.rs"
            rm -rf "$to"
            mv "$to.new$$" "$to"
            a=$to/src/lib.rs
            ;;
    esac
    set -- "$@" "$a"
    i=$((i + 1))
done
exec "$rustc" "$@"
