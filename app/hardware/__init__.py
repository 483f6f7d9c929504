"""Facts about the machine, and the serving plan made from them."""
