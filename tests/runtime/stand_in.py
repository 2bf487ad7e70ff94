"""Stand-ins for a GPU and its launchers: CPU tensors are dispatched as if they lay on an H100."""

import contextlib

import torch

from autoflash.runtime import dispatch
from autoflash.runtime.launcher import Launcher
from autoflash.target import named_target

H100 = named_target("h100")


class Unloaded(Launcher):
    """A launcher that compiles nothing; ``bind`` is called in place of its own."""

    def __init__(self, kernel, bind):
        self.kernel, self.bind = kernel, bind


@contextlib.contextmanager
def gpu_in(modules, launcher_for, monkeypatch):
    """Until it is left the dispatchers ``modules`` see an H100 with stream 7, and know no plans
    from before."""
    for module in modules:
        monkeypatch.setattr(module, "launcher_for", launcher_for)
        monkeypatch.setattr(module, "current_target", lambda device: H100)
    monkeypatch.setattr("torch.cuda.device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    dispatch.forget()
    yield
    dispatch.forget()


def note_empty(monkeypatch):
    """The tensors that torch.empty makes from now on."""
    made, empty = [], torch.empty

    def noting(*shape, **options):
        made.append(empty(*shape, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", noting)
    return made
