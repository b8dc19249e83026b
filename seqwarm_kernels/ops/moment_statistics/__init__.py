"""`seqwarm::moment_statistics`: sizes of an optimizer's moments and of its gradients, in one pass over all of them."""
