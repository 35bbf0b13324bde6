"""One rank at work: its weights, KV cache, stage, transport and sampling."""
