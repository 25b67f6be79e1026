"""AMX tiles of x86 CPUs."""


def ask_for_amx() -> None:
    """Asks the kernel for this process's use of AMX tiles, where the CPU has them. Forks inherit it.

    Why: vLLM's CPU attention uses them unasked, and dies of SIGILL unless oneDNN has asked before, which it
    does not for small models (vLLM 0.32).
    """
    import torch

    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()
