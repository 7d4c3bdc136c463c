"""What an MPI launcher, srun or a torchrun-like one put into the environment of this process; no MPI.

The same table as python/odyssey/launcher.py. The rank that counts is that of a communicator; this one says who speaks
before there is one.
"""

from std.os import getenv


@fieldwise_init
struct Launched(Copyable, Movable):
    """What a launcher announced: its name, this process's rank of `size`, and the same among those on this machine.
    """

    var launcher: String
    """What the launcher is called."""
    var rank: Int
    """This process."""
    var size: Int
    """How many processes it started."""
    var local_rank: Int
    """This process among those of this machine; `rank` where the launcher is silent about it."""
    var local_size: Int
    """How many processes it started on this machine; `size` where it is silent."""
    var mpi: Bool
    """Whether an MPI library that understands this launcher finds its ranks by it."""


def launched() -> Optional[Launched]:
    """What an MPI launcher or srun announced, or nothing where none started this process.

    Returns:
        What it announced.
    """
    for row in _names():
        var rank = _number(row[1])
        var size = _number(row[2])
        if rank and size:
            return Launched(
                row[0],
                rank.value(),
                size.value(),
                _number(row[3]).or_else(rank.value()),
                _number(row[4]).or_else(size.value()),
                row[0] != "srun",
            )
    return None


def announced_rank() -> Int:
    """The rank that a launcher gave this process, 0 without one. Only for deciding who speaks.

    Returns:
        The rank.
    """
    for row in _names():
        var rank = _number(row[1])
        if rank:
            return rank.value()
    return 0


def rendezvous_size() -> Int:
    """How many processes the variables of env:// (torchrun) speak of; 1 if they are not all there.

    Returns:
        The number of processes.
    """
    var rank = _number("RANK")
    var size = _number("WORLD_SIZE")
    var place = getenv("MASTER_ADDR") != "" and getenv("MASTER_PORT") != ""
    return size.value() if rank and size and place else 1


def _names() -> List[List[String]]:
    """Launcher, rank, size, rank on this machine, ranks on this machine; why these: launcher.py.
    """
    return [
        ["PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
        [
            "Open MPI",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
        [
            "MVAPICH",
            "MV2_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE",
        ],
        [
            "PMIx",
            "PMIX_RANK",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_NTASKS_PER_NODE",
        ],
        [
            "srun",
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_NTASKS_PER_NODE",
        ],
    ]


def _number(name: String) -> Optional[Int]:
    var text = getenv(name)
    var n = 0
    if not 1 <= text.byte_length() <= 9:
        return None
    for c in text.as_bytes():
        if not 48 <= Int(c) <= 57:
            return None
        n = 10 * n + Int(c) - 48
    return n
