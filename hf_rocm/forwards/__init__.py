"""Record the forwards of encoders by shape, and replay them."""
