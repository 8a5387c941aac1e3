"""The expert pass beside its peers and the machine's ceilings: `bench moe`."""
