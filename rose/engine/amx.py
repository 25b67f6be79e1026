"""AMX tiles of x86 CPUs: a process's right to use them, and kernels of vLLM that do without."""

import json

from rose.memory.pool.sizing import model_folder


def ask_for_amx() -> None:
    """Asks the kernel for this process's use of AMX tiles, where the CPU has them. Forks inherit it.

    Why: vLLM's CPU attention uses them unasked, and dies of SIGILL unless oneDNN has asked before, which it
    does not for small models (vLLM 0.32).
    """
    import torch

    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()


def portable_attention(model: str) -> str | None:
    """Returns vLLM's attention for CPUs without AMX if the model has latent attention, else None.

    Why: vLLM's latent attention on AMX takes bfloat16 alone, and a KV cache whose blocks of one layer lie
    side by side, which those in slabs don't.
    """
    folder = model_folder(model)
    if folder is None:
        return None
    return "CPU_MLA" if json.loads((folder / "config.json").read_text()).get("kv_lora_rank") else None
