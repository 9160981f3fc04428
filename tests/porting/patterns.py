# ruff: noqa: E501 (a pattern is a line)
"""Code that port-check must find, and code that looks like it and must be left alone."""

from __future__ import annotations

# (rule, file name, text): each holds exactly one finding
PLANTED = [
    ("nvidia-only-import", "a.py", "import pynvml\n"),
    ("nvidia-only-import", "a.py", "import torch\nif torch.cuda.is_available():\n    import pynvml as nv\n"),
    ("nvidia-only-import", "a.py", "from flash_attn import flash_attn_func\n"),
    ("nvidia-only-import", "a.py", "import torch_tensorrt\n"),
    ("nvidia-only-import", "a.py", "class Model:\n    import cutlass.cute as cute\n"),
    ("flash-attn-call", "a.py", "def f(q, k, v):\n    from flash_attn import flash_attn_func as f\n    f(q, k, v)\n"),
    ("flash-attn-call", "a.py", "def f(q):\n    import flash_attn\n    return flash_attn.flash_attn_func(q, q, q)\n"),
    ("expanded-key-value", "a.py", "def f(q, k, v):\n    k = repeat_kv(k, 4)\n"
     "    return F.scaled_dot_product_attention(q, k, v)\n"),
    ("expanded-key-value", "a.py", "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
     "def f(q, k, v):\n    return sdpa(q, k.repeat_interleave(4, dim=1), v)\n"),
    ("expanded-key-value", "a.py", "import torch\ndef f(q, k, v, n):\n    k = torch.repeat_interleave(k, n, 1)\n"
     "    return torch.nn.functional.scaled_dot_product_attention(q, k, v)\n"),
    ("compile-mode", "a.py", "import torch\nf = torch.compile(g, mode='reduce-overhead')\n"),
    ("compile-mode", "a.py", "import torch\n@torch.compile(mode='max-autotune')\ndef f(x): ...\n"),
    ("compile-mode", "a.py", "import functools, torch\nf = functools.partial(torch.compile, mode='reduce-overhead')\n"),
    ("compile-mode", "a.py", "model.compile(mode='reduce-overhead')\n"),
    ("inductor-setting", "a.py", "import torch._inductor.config as c\nc.triton.cudagraphs = True\n"),
    ("inductor-setting", "a.py", "from torch._inductor import config\nconfig.memory_planning = True\n"),
    ("inductor-setting", "a.py", "import torch\nf = torch.compile(g, options={'triton.cudagraphs': True})\n"),
    ("random-state-in-capture", "a.py", "import torch\nwith torch.cuda.graph(g):\n    s = torch.cuda.get_rng_state()\n"),
    ("allocator-split-size", "a.py", "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'max_split_size_mb:128'\n"),
    ("allocator-conflict", "a.py", "import os\nos.environ.setdefault('PYTORCH_HIP_ALLOC_CONF', "
     "'max_split_size_mb:64,expandable_segments:True')\n"),
    ("tf32-flag", "a.py", "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True\n"),
    ("cudnn-benchmark", "a.py", "from torch.backends import cudnn\ncudnn.benchmark = True\n"),
    ("unknown-aiter-name", "a.py", "import aiter\ny = aiter.linear(x, w)\n"),
    ("unknown-aiter-name", "a.py", "from aiter.tuned_gemm import gemm_a8w8\n"),
    ("unknown-aiter-variable", "a.py", "import os, aiter\nos.environ['AITER_ENABLE_FUSION'] = '1'\n"),
    ("aiter-positional-arguments", "a.py", "import torch\ntorch.ops.aiter.mha_fwd(q, k, v, 0.0, s, True)\n"),
    ("aiter-import-error", "a.py", "try:\n    import aiter\nexcept ImportError:\n    aiter = None\n"),
    ("cuda-pin", "requirements.txt", "numpy\ntorch==2.6.0+cu124\n"),
    ("cuda-pin", "requirements-dev.txt", "--extra-index-url https://download.pytorch.org/whl/cu121\n"),
    ("nvidia-only-requirement", "pyproject.toml", "[project]\ndependencies = ['jax[cuda12]>=0.5']\n"),
    ("nvidia-only-requirement", "pyproject.toml", "[project]\ndependencies = ['nvidia-cublas-cu12']\n"),
    ("torch-pin", "pyproject.toml", "[project]\ndependencies = ['torch==2.7.1']\n"),
    ("wrong-aiter", "requirements.txt", "aiter\n"),
    ("requires-python", "pyproject.toml", "[project]\nrequires-python = '>=3.11,<3.12'\n"),
    ("cuda-header", "a.cu", "#include <cutlass/gemm/device/gemm.h>\n"),
    ("hipified-header", "a.cpp", "#include <cublasLt.h>\n"),
    ("inline-ptx", "a.cuh", 'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\\n" ::"r"(a), "l"(b));\n'),
    ("inline-ptx", "a.cu", 'asm("{\\n"\n    " .reg .pred p;\\n"\n    " setp.ne.b32 p, %0, 0;\\n"\n    "}" ::"r"(x));\n'),
    ("lane-mask-32", "a.cu", "x += __shfl_xor_sync(0xffffffff, x, 16);\n"),
    ("lane-mask-32", "a.cu", "unsigned mask = __ballot_sync(m, p);\n"),
]  # fmt: skip

# (what it looks like, file name, text): none holds a finding
NEAR_MISSES = [
    ("nvidia-only-import", "a.py", "try:\n    import pynvml\nexcept ImportError:\n    pynvml = None\n"),
    ("nvidia-only-import", "a.py", "def f():\n    import pynvml\n"),
    ("nvidia-only-import", "a.py", "import torch\nif torch.version.hip is None:\n    import pynvml\n"),
    ("nvidia-only-import", "a.py", "if is_flash_attn_2_available():\n    from flash_attn import flash_attn_func\n"),
    ("nvidia-only-import", "a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tensorrt\n"),
    ("nvidia-only-import", "a.py", "from .flash_attn import mine\nimport flash_attention_of_mine\n"),
    ("nvidia-only-import", "a.py", "import contextlib\nwith contextlib.suppress(ImportError):\n    x = 'import pynvml'\n"),
    ("flash-attn-call", "a.py", "try:\n    from flash_attn import flash_attn_func\nexcept ImportError:\n"
     "    flash_attn_func = None\ndef f(q):\n    return flash_attn_func(q, q, q)\n"),
    ("flash-attn-call", "a.py", "def f(q):\n    if not HAS_FLASH:\n        raise RuntimeError\n"
     "    from flash_attn import flash_attn_func\n    return flash_attn_func(q, q, q)\n"),
    ("flash-attn-call", "a.py", "def flash_attn_func(q): ...\nflash_attn_func(1)\n"),
    ("expanded-key-value", "a.py", "def f(q, k, v):\n    k = repeat_kv(k, 4)\n    return eager(q, k, v)\n"),
    ("expanded-key-value", "a.py", "def f(q, k, v):\n    o = F.scaled_dot_product_attention(q, k, v)\n"
     "    k = repeat_kv(k, 4)\n    return o, k\n"),
    ("expanded-key-value", "a.py", "def f(q, k, v):\n    k = k.repeat_interleave(2, dim=2)\n"
     "    return F.scaled_dot_product_attention(q, k, v)\n"),
    ("compile-mode", "a.py", "import torch\nf = torch.compile(g, mode='default')\n"),
    ("compile-mode", "a.py", "import torch\nif not is_rocm():\n    f = torch.compile(g, mode='reduce-overhead')\n"),
    ("compile-mode", "a.py", "import torch\nf = torch.compile(g, mode='default' if torch.version.hip else 'max-autotune')\n"),
    ("compile-mode", "a.py", "writer.compile(mode='fast')\nre.compile('reduce-overhead')\n"),
    ("inductor-setting", "a.py", "import torch._inductor.config as c\nc.triton.cudagraphs = False\n"),
    ("inductor-setting", "a.py", "mine.config.triton.cudagraphs = True\n"),
    ("random-state-in-capture", "a.py", "import torch\ns = torch.cuda.get_rng_state()\nwith torch.cuda.graph(g):\n    f()\n"),
    ("allocator-split-size", "a.py", "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\n"),
    ("allocator-split-size", "a.py", "# PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128\nx = 'max_split_size_mb:128'\n"),
    ("tf32-flag", "a.py", "import torch\nif torch.version.cuda is not None:\n    torch.backends.cudnn.allow_tf32 = True\n"),
    ("tf32-flag", "a.py", "import torch\nold = torch.backends.cuda.matmul.allow_tf32\n"),
    ("cudnn-benchmark", "a.py", "import torch\ntorch.backends.cudnn.benchmark = False\n"),
    ("cudnn-benchmark", "a.py", "import torch\ndef f():\n    if torch.version.hip:\n        return\n"
     "    torch.backends.cudnn.benchmark = True\n"),
    ("unknown-aiter-name", "a.py", "import aiter\ny = aiter.flash_attn_func(q, k, v, causal=True)\n"),
    ("unknown-aiter-name", "a.py", "def f(aiter):\n    return [x.linear for x in aiter]\n"),
    ("aiter-positional-arguments", "a.py", "import aiter\naiter.flash_attn_func(q, k, v, softmax_scale=s)\n"),
    ("aiter-import-error", "a.py", "try:\n    import aiter\nexcept (ImportError, RuntimeError):\n    aiter = None\n"),
    ("cuda-pin", "requirements.txt", "torch>=2.6\n# torch==2.6.0+cu124\n"),
    ("torch-pin", "requirements.txt", "torch==2.9.1+rocm7.0\ntorchmetrics==1.0\n"),
    ("cuda-pin", "pyproject.toml", "[project.optional-dependencies]\ncuda = ['torch==2.6+cu124', 'pynvml']\n"),
    ("wrong-aiter", "requirements.txt", "amd-aiter\naiter-tools\n"),
    ("requires-python", "pyproject.toml", "[project]\nrequires-python = '>=3.10'\n"),
    ("cuda-header", "a.cu", "#ifdef USE_ROCM\n#include <cutlass/x.h>\n#endif\n"),
    ("inline-ptx", "a.cu", 'asm volatile("v_add_f32 %0, %1, %2" : "=v"(a));\n// asm("cp.async.cg x");\n'),
    ("lane-mask-32", "a.cu", "x += __shfl_xor_sync(0xffffffffffffffffull, x, 16);\n"),
    ("lane-mask-32", "a.cu", "#if defined(__HIP_PLATFORM_AMD__)\n#else\nx += __shfl_xor_sync(0xffffffff, x, 1);\n#endif\n"),
]  # fmt: skip
