"""The C backend: one fused, threaded pass over CPU tensors."""
