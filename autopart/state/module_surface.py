"""What a pipe shows of the modules and buffers of its model, as a module does; nothing here moves data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from autopart.state.misuse_guards import NotAModule, short_tracebacks


@short_tracebacks
class ModuleSurface(NotAModule):
    """The modules of the model that was compiled, to look at: parameters that other ranks train are stale in them."""

    @property
    def model(self) -> nn.Module:
        """The model that was compiled."""
        raise NotImplementedError

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's buffers under their original names."""
        raise NotImplementedError

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield `named_buffers` without the names."""
        for _, buffer in self.named_buffers():
            yield buffer

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the model under their names, itself under the empty one."""
        yield from self.model.named_modules()

    def modules(self) -> Iterator[nn.Module]:
        """Yield `named_modules` without the names."""
        yield from self.model.modules()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the direct children of the model under their names."""
        yield from self.model.named_children()

    def children(self) -> Iterator[nn.Module]:
        """Yield `named_children` without the names."""
        yield from self.model.children()
