"""How a module's forward, or an operation, comes to run in another precision than the code around it."""

from halfstep.casting.islands import Island, Islands, check_no_island
from halfstep.casting.nests import NestChange, cast_arguments, cast_tensors
from halfstep.casting.operations import (
    OperationTable,
    Registrations,
    enter_table,
    in_force,
    leave_table,
    shielding_table,
    watched_operations,
)
from halfstep.casting.regions import Region

__all__ = [
    "Island",
    "Islands",
    "NestChange",
    "OperationTable",
    "Region",
    "Registrations",
    "cast_arguments",
    "cast_tensors",
    "check_no_island",
    "enter_table",
    "in_force",
    "leave_table",
    "shielding_table",
    "watched_operations",
]
