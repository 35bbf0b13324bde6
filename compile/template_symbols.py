"""The names of functions that belong to a template."""


def island_symbol(template: str, index: int) -> str:
    """The symbol of a template's island."""
    return f"{template}_island{index}"


def instance_prefix(template: str, number: int) -> str:
    """What is before the names of the functions of a kernel that only item `number` calls."""
    return f"{template}_item{number}_"


def epilogue_symbol(template: str, number: int) -> str:
    """The function that item `number`, a linear, calls on outputs that it has finished."""
    return f"{template}_epilogue{number}"
