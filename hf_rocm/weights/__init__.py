"""Changes to a model's weights after loading, and their inverses.

`fuse` joins the linear layers of one module. `hf_rocm.prepare` prepares a whole model, and `restore` undoes it.
"""
