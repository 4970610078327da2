//! The embedded checkpoint opens, equals the folder, and carries its notices.

use std::path::Path;

#[test]
fn the_embedded_checkpoint_opens_and_equals_the_folder() {
    let embedded = lily_demo::open().unwrap();
    let folder = lily_checkpoint::Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
    assert_eq!(embedded.config(), folder.config());
    let names = |checkpoint: &lily_checkpoint::Checkpoint| -> Vec<String> {
        checkpoint.tensors().map(|tensor| tensor.name.clone()).collect()
    };
    assert!(!names(&embedded).is_empty());
    assert_eq!(names(&embedded), names(&folder));
}

#[test]
fn the_notices_name_what_must_be_named() {
    for text in [
        "WordNet 3.0 Copyright 2006 by Princeton University.",
        "Permission to use, copy, modify and distribute this software and",
        "https://www.geonames.org",
        "https://creativecommons.org/licenses/by/4.0/",
    ] {
        assert!(lily_demo::NOTICE.contains(text), "{text}");
    }
}
