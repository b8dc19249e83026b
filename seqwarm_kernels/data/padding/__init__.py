"""How much padding a way of batching costs on a corpus."""
