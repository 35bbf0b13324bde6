"""The command line: specs, tokens, the generation loop and its output."""
