"""Which rank owns which layers and which graph nodes, and the proof that nothing is lost."""
