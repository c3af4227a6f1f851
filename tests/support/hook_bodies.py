"""Bodies for the methods of planners that a user may override: two tables, from a method to its bodies.

A body gets what it stands before, the planner, and the arguments.
"""

import dataclasses
import io

import torch
from torch.distributed.checkpoint.default_planner import (
    create_default_global_load_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.planner import LoadPlan, WriteItemType

from support.hooks import inner


def notes(planner):
    """What the body wrote down, in the planner or the one that it wraps."""
    return vars(inner(planner)).setdefault("notes", [])


def note(planner, *what):
    notes(planner).append(repr(what))


# --- loads


def seen(item):
    return (
        item.type.name,
        item.dest_index,
        item.storage_index,
        tuple(item.storage_offsets),
        tuple(item.lengths),
    )


def set_up_by_itself(own, self, state_dict, metadata=None, is_coordinator=False):
    self.original_state_dict = state_dict
    self.metadata = metadata
    self.is_coordinator = is_coordinator
    self.flatten_state_dict = False
    self.state_dict = {key: state_dict[key] for key in ("w", "b") if key in state_dict}


def set_up_and_forget(own, self, *args, **kwargs):
    own(*args, **kwargs)
    del self.state_dict["w"]


def count(own, self, *args, **kwargs):
    note(self, "called")
    return own(*args, **kwargs)


def plan_and_look(own, self):
    plan = own()
    note(self, len(plan.items), [seen(item) for item in plan.items])
    return plan


def plan_a_part(own, self):
    plan = own()
    return dataclasses.replace(
        plan, items=[i for i in plan.items if i.dest_index.fqn not in ("w", "nest.step")]
    )


def plan_less_in_place(own, self):
    plan = own()
    del plan.items[0]
    plan.items.pop()
    return plan


def plan_from_another_name(own, self):
    """The doc's renaming planner: what the state dict calls `b` is stored as `v`."""
    plan = own()

    def renamed(item):
        index = item.storage_index
        return dataclasses.replace(
            item,
            storage_index=dataclasses.replace(index, fqn="v" if index.fqn == "b" else index.fqn),
        )

    return LoadPlan([renamed(item) for item in plan.items], planner_data=plan.planner_data)


def plan_more(own, self):
    """One stored row more, to a tensor that the plan would have filled with something else."""
    plan = own()
    row = next(i for i in plan.items if i.dest_index.fqn == "b")
    extra = dataclasses.replace(
        row,
        dest_index=dataclasses.replace(row.dest_index, fqn="spare"),
    )
    return dataclasses.replace(
        plan, items=[i for i in plan.items if i.dest_index.fqn != "spare"] + [extra]
    )


def plan_in_another_order(own, self):
    plan = own()
    return LoadPlan(list(reversed(plan.items)))


def plan_by_itself(own, self):
    return create_default_local_load_plan({"w": self.state_dict["w"]}, self.metadata)


def plan_with_a_smaller_state(own, self):
    self.state_dict = {key: value for key, value in self.state_dict.items() if key != "nest.t"}
    return own()


def plan_globally(own, self, plans):
    note(self, [sorted(map(seen, plan.items), key=repr) for plan in plans])
    return own(plans)


def plan_globally_less(own, self, plans):
    return [LoadPlan([i for i in plan.items if i.dest_index.fqn != "w"]) for plan in own(plans)]


def plan_globally_by_itself(own, self, plans):
    return create_default_global_load_plan(list(plans))


def finish_and_look(own, self, plan):
    plan = own(plan)
    note(self, sorted(map(seen, plan.items), key=repr))
    return plan


def finish_with_less(own, self, plan):
    return own(LoadPlan([item for item in plan.items if item.dest_index.fqn != "nest.t"]))


def finish_by_itself(own, self, plan):
    return LoadPlan(list(plan.items)[:3])


def bytes_of_its_own(own, self, read_item, value):
    loaded = torch.load(value, weights_only=True)
    self.original_state_dict["values"] = [*self.original_state_dict.get("values", []), loaded]


def bytes_and_more(own, self, read_item, value):
    note(self, seen(read_item))
    own(read_item, value)
    self.original_state_dict["loaded"] = True


def bytes_left(own, self, read_item, value):
    note(self, value.tell(), read_item.dest_index.fqn)


def resolve_and_count(own, self, read_item):
    tensor = own(read_item)
    note(self, seen(read_item), tuple(tensor.shape), tensor.device)
    return tensor


def resolve_elsewhere(own, self, read_item):
    """New memory for everything, kept by name: the state dict stays as it is."""
    made = torch.full(tuple(read_item.lengths), 0, dtype=own(read_item).dtype)
    vars(self).setdefault("made", {})[repr(read_item.dest_index), tuple(read_item.dest_offsets)] = (
        made
    )
    return made


def commit_and_double(own, self, read_item, tensor):
    note(self, seen(read_item), tensor.sum().item())
    tensor.mul_(2)
    own(read_item, tensor)


def commit_alone(own, self, read_item, tensor):
    note(self, read_item.dest_index.fqn)


def look_up_and_count(own, self, index):
    note(self, index)
    return own(index)


def look_up_another(own, self, index):
    if index.fqn == "b":
        return self.state_dict["spare"]
    return own(index)


def transform_and_count(own, self, read_item, tensor):
    note(self, seen(read_item), tuple(tensor.shape))
    return own(read_item, tensor)


def transform_to_double(own, self, read_item, tensor):
    """A temporary of another dtype, which nobody commits: nothing arrives."""
    return own(read_item, tensor).double()


LOADS = {
    "set_up_planner": [count, set_up_by_itself, set_up_and_forget],
    "create_local_plan": [
        count,
        plan_and_look,
        plan_a_part,
        plan_less_in_place,
        plan_from_another_name,
        plan_more,
        plan_in_another_order,
        plan_by_itself,
        plan_with_a_smaller_state,
    ],
    "create_global_plan": [count, plan_globally, plan_globally_less, plan_globally_by_itself],
    "finish_plan": [count, finish_and_look, finish_with_less, finish_by_itself],
    "load_bytes": [count, bytes_of_its_own, bytes_and_more, bytes_left],
    "resolve_bytes": [count],
    "resolve_tensor": [count, resolve_and_count, resolve_elsewhere],
    "commit_tensor": [count, commit_and_double, commit_alone],
    "lookup_tensor": [count, look_up_and_count, look_up_another],
    "transform_tensor": [count, transform_and_count, transform_to_double],
}


# --- saves


def written(item):
    data = item.tensor_data
    chunk = (
        None
        if data is None
        else (tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size))
    )
    return item.type.name, item.index, chunk, None if data is None else data.properties.dtype


def save_a_part(own, self, state_dict, *args, **kwargs):
    return own({key: value for key, value in state_dict.items() if key != "b"}, *args, **kwargs)


def save_under_other_names(own, self, state_dict, *args, **kwargs):
    return own({f"x_{key}": value for key, value in state_dict.items()}, *args, **kwargs)


def set_up_a_save_by_itself(own, self, state_dict, storage_meta=None, is_coordinator=False):
    self.flatten_state_dict = False
    self.state_dict = {"w": state_dict["w"], "v": state_dict["v"]}
    self.is_coordinator = is_coordinator


def set_up_and_change(own, self, *args, **kwargs):
    own(*args, **kwargs)
    self.state_dict = dict(self.state_dict) | {"late": torch.arange(3)}


def plan_and_look_at_writes(own, self):
    plan = own()
    note(self, len(plan.items), sorted(map(written, plan.items), key=repr))
    return plan


def plan_fewer_writes(own, self):
    plan = own()
    return dataclasses.replace(
        plan, items=[i for i in plan.items if i.index.fqn not in ("b", "nest.step")]
    )


def plan_fewer_writes_in_place(own, self):
    plan = own()
    del plan.items[0]
    return plan


def plan_writes_by_itself(own, self):
    plan = create_default_local_save_plan({"w": self.state_dict["w"]}, self.is_coordinator)
    return dataclasses.replace(plan, planner_data=self.mappings)


def plan_one_write_more(own, self):
    """The docs' planner that saves more than it was given."""
    self.state_dict["extra"] = torch.arange(4)
    plan = own()
    more = create_default_local_save_plan({"extra": self.state_dict["extra"]}, self.is_coordinator)
    return dataclasses.replace(
        plan, items=[i for i in plan.items if i.index.fqn != "extra"] + more.items
    )


def global_look(own, self, plans):
    note(self, [sorted(map(written, plan.items), key=repr) for plan in plans])
    return own(plans)


def global_less(own, self, plans):
    return own(
        [dataclasses.replace(p, items=[i for i in p.items if i.index.fqn != "v"]) for p in plans]
    )


def global_after(own, self, plans):
    plans, metadata = own(plans)
    note(self, len(plans))
    return plans, metadata


def dedup_and_look(own, self, plans):
    plans = own(plans)
    note(self, [len(plan.items) for plan in plans])
    return plans


def finish_and_look_at_writes(own, self, plan):
    plan = own(plan)
    for item in plan.items:
        note(self, item.type.name, item.index.fqn)
    return plan


def finish_unchanged(own, self, plan):
    self.plan = plan
    return plan


def resolve_and_double(own, self, write_item):
    note(self, write_item.index.fqn)
    data = own(write_item)
    return data * 2 if isinstance(data, torch.Tensor) else data


def resolve_by_itself(own, self, write_item):
    if write_item.type == WriteItemType.BYTE_IO:
        stream = io.BytesIO()
        torch.save("always the same", stream)
        return stream
    return torch.zeros(
        write_item.tensor_data.chunk.sizes, dtype=write_item.tensor_data.properties.dtype
    )


def object_noted(own, self, index):
    note(self, index.fqn)
    return own(index)


def object_of_its_own(own, self, index):
    return "text" if index.fqn == "nest.step" else own(index)


def transform_and_double(own, self, write_item, thing):
    note(self, write_item.index.fqn)
    made = own(write_item, thing)
    return made * 2 if isinstance(made, torch.Tensor) else made


SAVES = {
    "set_up_planner": [
        count,
        save_a_part,
        save_under_other_names,
        set_up_a_save_by_itself,
        set_up_and_change,
    ],
    "create_local_plan": [
        count,
        plan_and_look_at_writes,
        plan_fewer_writes,
        plan_fewer_writes_in_place,
        plan_writes_by_itself,
        plan_one_write_more,
    ],
    "create_global_plan": [count, global_look, global_less, global_after],
    "_create_global_plan": [count, global_look, global_less],
    "_create_global_plan_with_caching": [count],
    "_dedup_save_plans": [count, dedup_and_look],
    "finish_plan": [count, finish_and_look_at_writes, finish_unchanged],
    "_finish_plan_with_caching": [count],
    "resolve_data": [count, resolve_and_double, resolve_by_itself],
    "lookup_object": [count, object_noted, object_of_its_own],
    "transform_object": [count, transform_and_double],
}
