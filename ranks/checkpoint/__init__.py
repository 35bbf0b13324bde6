"""Reading models from disk: Hugging Face directories and GGUF files, trusted only after checks."""
