"""Parameters: how those of a model are found and laid out in an arena.

The fields of a module that are layers or modules are found by reflection, in the order in which they are declared, and
so are their parameters; names are those of the fields, as "conv1.weight". Parameter k of a model gets numbers that are
a function of (seed, k), as in python/odyssey/nn/module.py. Nothing here computes.
"""

from std.reflection import reflect

from kernels.lanes import LANES

from .json import Json, JsonList, json


struct Parameter(Copyable, Parametric):
    """A weight or bias: its shape, and where it is in the arena once an engine has the model.
    """

    var shape: List[Int]
    """Its sizes, such as (O, I)."""
    var bound: Float64
    """Initial values are uniform in [-bound, bound)."""
    var at: Int
    """The position of its first float in the arena; -1 before an engine has the model."""

    def __init__(out self, var shape: List[Int], bound: Float64):
        """A parameter of this shape, with initial values in [-bound, bound).

        Args:
            shape: Its sizes.
            bound: Of the initial values.
        """
        self.shape = shape^
        self.bound = bound
        self.at = -1

    def size(self) -> Int:
        """Its number of floats.

        Returns:
            The number.
        """
        var n = 1
        for s in self.shape:
            n *= s
        return n

    def found(self) raises -> Int:
        """`at`, once it is known.

        Returns:
            Floats of the arena before it.

        Raises:
            Error: The parameter is where reflection does not see it, in a list, say.
        """
        if self.at < 0:
            raise Error(
                "[model] a parameter is used that was not found in the model:"
                " its layer is in a list, or not a field of a Module; make"
                " every layer a field, or use Sequential"
            )
        return self.at

    def collect(mut self, mut into: Parameters, name: String):
        """Adds itself.

        Args:
            into: Where to.
            name: Its name in the model.
        """
        into.add(self, name)

    @staticmethod
    def describe(mut into: JsonList):
        """Adds nothing: it is no layer.

        Args:
            into: Unchanged.
        """
        pass


struct Parameters(Copyable, Movable, Sized):
    """The parameters of a model by name, and their layout in an arena: each starts on a vector.
    """

    var names: List[String]
    """Such as "conv1.weight"."""
    var shapes: List[List[Int]]
    """Sizes of each."""
    var bounds: List[Float64]
    """Of the initial values of each."""
    var offsets: List[Int]
    """Where each begins in the arena, in floats."""
    var size: Int
    """Floats of the arena, a multiple of LANES."""

    def __init__(out self):
        """None."""
        self.names = List[String]()
        self.shapes = List[List[Int]]()
        self.bounds = List[Float64]()
        self.offsets = List[Int]()
        self.size = 0

    def __len__(self) -> Int:
        """How many parameters there are.

        Returns:
            The number.
        """
        return len(self.names)

    def add(mut self, mut p: Parameter, name: String):
        """Gives a parameter its place.

        Args:
            p: It is told its place.
            name: Its name in the model.
        """
        p.at = self.size
        self.names.append(name)
        self.shapes.append(p.shape.copy())
        self.bounds.append(p.bound)
        self.offsets.append(self.size)
        self.size += (p.size() + LANES - 1) // LANES * LANES

    def floats(self, i: Int) -> Int:
        """The size of parameter i.

        Args:
            i: Which, from 0.

        Returns:
            Floats.
        """
        var n = 1
        for s in self.shapes[i]:
            n *= s
        return n


trait Parametric(Deinitable, Movable):
    """What has parameters: a layer, a module, or several of them."""

    def collect(mut self, mut into: Parameters, name: String):
        """Adds the parameters of all fields, in order, with dotted names.

        Args:
            into: Where to.
            name: Of this one in the model, "" for the model itself.
        """
        comptime r = reflect[Self]
        comptime names = r.field_names()
        comptime types = r.field_types()
        comptime for i in range(r.field_count()):
            comptime T = types[i]
            comptime field = names[i]
            comptime if conforms_to(T, Parametric):
                r.field_ref[i](self).collect(into, dotted(name, String(field)))

    @staticmethod
    def describe(mut into: JsonList):
        """Adds the name of this one, and those of what is in it, as a checkpoint compares them.

        Args:
            into: Where to.
        """
        comptime r = reflect[Self]
        comptime types = r.field_types()
        comptime own = r.base_name()
        into.append(named(own))
        comptime for i in range(r.field_count()):
            comptime T = types[i]
            comptime if conforms_to(T, Parametric):
                T.describe(into)


def named(name: StringSpan) -> Json:
    """A list of one name.

    Args:
        name: The name.

    Returns:
        The list, as JSON.
    """
    var one = JsonList()
    one.append(json(String(name)))
    return one.json()


def dotted(name: String, field: String) -> String:
    """The name of a field of what has this name.

    Args:
        name: Of the outer one; "" for the model.
        field: Of the inner one.

    Returns:
        Both, with a dot between them.
    """
    return field if name == "" else String(name, ".", field)
