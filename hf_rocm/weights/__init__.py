"""What is done to a model's weights after loading, and how it is undone.

`fuse` joins the linear layers of one module, `prepare` does everything to a whole model and takes it back.
"""
