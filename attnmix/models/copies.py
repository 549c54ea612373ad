"""`copy_model`: copy a model; the copy shares the hooks of the original."""

import copy
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copy_model(model: PreTrainedModel, memo: dict[int, Any] | None = None) -> PreTrainedModel:
    """Return a copy of a model; the copy and the original share their hooks.

    Hooks are not copied, because they may refer to objects that cannot be copied, such as stored activations. Only
    hooks that are methods of the model's modules refer to the copied modules. As in `copy.deepcopy`, `memo` contains
    objects of the copy by the ID of the original object.
    """
    objects = {} if memo is None else memo
    modules = set(model.modules())
    for module in modules:
        for hook in _list_hooks(module):
            owner = getattr(hook, "__self__", hook)  # the object of a bound method, or else the hook itself
            is_module_of_model = isinstance(owner, Module) and owner in modules
            if not is_module_of_model:
                objects[id(owner)] = owner  # `deepcopy` then uses the original object as its own copy
    return copy.deepcopy(model, objects)


def _list_hooks(module: Module) -> list[Any]:
    """Return the hooks of a module, without those of its submodules."""
    hooks: list[Any] = []
    for attribute in HOOKS:
        hooks.extend(getattr(module, attribute).values())
    return hooks
