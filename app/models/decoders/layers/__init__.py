"""The layers of decoders: attention, MLP, experts, and what is around them."""
