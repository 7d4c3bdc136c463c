"""A linear layer with made-up numbers, on the host and on a GPU, for check.mojo and bits.mojo."""

from max.gpu.host import DeviceBuffer, DeviceContext, HostBuffer
from wgmma import BF16, F32, FORWARD, INPUT, WEIGHT, Lanes, enqueue

comptime NAMES = ["forward", "input", "weight"]


def number[exact: Bool](i: Int, salt: Int) -> Float32:
    """A number that depends on i and salt alone. exact: a multiple of 1/8, so that sums of products are exact. Otherwise
    it is about normal, so that they are not."""
    comptime if exact:
        var h = (i * 2654435761 + salt * 40503) & 0xFFFFFFFF
        h = (h ^ (h >> 15)) * 2246822519 & 0xFFFFFFFF
        return Float32((h >> 13) % 17 - 8) / 8
    var sum = Float32(0)
    for turn in range(4):
        var h = (i * 2654435761 + (salt * 4 + turn) * 40503 * 65537) & 0xFFFFFFFF
        h = (h ^ (h >> 15)) * 2246822519 & 0xFFFFFFFF
        h = (h ^ (h >> 13)) * 3266489917 & 0xFFFFFFFF
        sum += Float32((h >> 8) & 0xFFFF) / 65536 - 0.5
    return sum


struct Layer[L: Int, exact: Bool](Movable):
    """The operands of a layer with I inputs and O outputs: shards of G groups of L tokens. A token's numbers don't depend
    on L."""

    var ctx: DeviceContext
    var shards: Int
    var G: Int
    var I: Int
    var O: Int
    var x: HostBuffer[BF16]
    """Inputs: (shards, G, I, L)."""
    var dy: HostBuffer[BF16]
    """Gradients of the outputs: (shards, G, O, L)."""
    var w: HostBuffer[BF16]
    """Weights: (O, I)."""
    var b: HostBuffer[F32]
    """Biases: O, and zeros up to I, which the product for the inputs gets."""
    var device_x: DeviceBuffer[BF16]
    var device_dy: DeviceBuffer[BF16]
    var device_w: DeviceBuffer[BF16]
    var device_b: DeviceBuffer[F32]

    def __init__(out self, ctx: DeviceContext, shards: Int, G: Int, I: Int, O: Int) raises:
        self.ctx = ctx
        self.shards = shards
        self.G = G
        self.I = I
        self.O = O
        self.x = ctx.enqueue_create_host_buffer[BF16](shards * G * I * Self.L)
        self.dy = ctx.enqueue_create_host_buffer[BF16](shards * G * O * Self.L)
        self.w = ctx.enqueue_create_host_buffer[BF16](O * I)
        self.b = ctx.enqueue_create_host_buffer[F32](max(I, O))
        ctx.synchronize()
        for t in range(shards * G * Self.L):
            for i in range(I):
                self.x[(t // Self.L * I + i) * Self.L + t % Self.L] = number[Self.exact](t * I + i, 1).cast[BF16]()
            for o in range(O):
                self.dy[(t // Self.L * O + o) * Self.L + t % Self.L] = number[Self.exact](t * O + o, 2).cast[BF16]()
        for i in range(O * I):
            self.w[i] = number[Self.exact](i, 3).cast[BF16]()
        for i in range(max(I, O)):
            self.b[i] = number[Self.exact](i, 4) if i < O else Float32(0)
        self.device_x = ctx.enqueue_create_buffer[BF16](len(self.x))
        self.device_dy = ctx.enqueue_create_buffer[BF16](len(self.dy))
        self.device_w = ctx.enqueue_create_buffer[BF16](len(self.w))
        self.device_b = ctx.enqueue_create_buffer[F32](len(self.b))
        ctx.enqueue_copy(self.device_x, self.x)
        ctx.enqueue_copy(self.device_dy, self.dy)
        ctx.enqueue_copy(self.device_w, self.w)
        ctx.enqueue_copy(self.device_b, self.b)

    def size[op: Int](self) -> Int:
        """Numbers that a product has per shard."""
        comptime if op == FORWARD:
            return self.G * self.O * Self.L
        elif op == INPUT:
            return self.G * self.I * Self.L
        else:
            return self.O * self.I

    def product[op: Int, columns: Int](self) raises -> HostBuffer[F32]:
        """The product of all shards on the GPU, in tiles of so many columns."""
        var size = self.size[op]()
        var y = self.ctx.enqueue_create_buffer[F32](self.shards * size)
        var to = Lanes(Int(y.unsafe_ptr()), size)
        var x = Lanes(Int(self.device_x.unsafe_ptr()), self.G * self.I * Self.L)
        var dy = Lanes(Int(self.device_dy.unsafe_ptr()), self.G * self.O * Self.L)
        var w = Lanes(Int(self.device_w.unsafe_ptr()), 0)
        var bias = Int(self.device_b.unsafe_ptr())
        comptime if op == FORWARD:
            enqueue[op, columns, F32, Self.L](self.ctx, self.shards, to, w, x, bias, self.G, self.I, self.O, 0)
        elif op == INPUT:
            enqueue[op, columns, F32, Self.L](self.ctx, self.shards, to, w, dy, bias, self.G, self.I, self.O, 0)
        else:
            enqueue[op, columns, F32, Self.L](self.ctx, self.shards, to, dy, x, bias, self.G, self.I, self.O, 0)
        var result = self.ctx.enqueue_create_host_buffer[F32](self.shards * size)
        self.ctx.enqueue_copy(result, y)
        self.ctx.synchronize()
        _ = y^
        return result^
