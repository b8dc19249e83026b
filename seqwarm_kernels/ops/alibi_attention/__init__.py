"""`seqwarm::alibi_attention` and `seqwarm::alibi_attention_varlen`: attention with a linear distance penalty."""
