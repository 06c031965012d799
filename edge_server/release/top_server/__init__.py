"""Server side of split inference: run a release's upper half on device features."""
