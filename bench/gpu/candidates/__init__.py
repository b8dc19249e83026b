"""Changes of the Triton kernels that compile and agree with the reference, and wait for a GPU: a patch each."""
