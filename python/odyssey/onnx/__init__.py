"""Models as ONNX graphs, for `odyssey.export` and `odyssey export --format onnx`."""
