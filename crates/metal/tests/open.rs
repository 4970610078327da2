//! What is said where there is no Metal, and that the device opens where there is.

use lily_gpu::DriverError;

#[test]
fn a_missing_device_is_explained() {
    match (lily_metal::usable(), lily_metal::open()) {
        (Ok(about), Ok(driver)) => assert!(about.starts_with(&driver.profile().name), "{about}"),
        (Err(why), Err(DriverError::Lost(error))) => {
            assert!(std::env::var_os("LILY_NEEDS_METAL").is_none(), "{why}");
            assert!(error.ends_with(&why), "{error}");
            if !lily_metal::is_supported() {
                assert!(why.contains("Apple silicon"), "{why}");
            }
        }
        (usable, Err(e)) => panic!("{usable:?}, and opening it: {e}"),
        (usable, Ok(_)) => panic!("{usable:?}, and it opens"),
    }
}
