"""What plans assume of the hardware a rank runs on."""

from dataclasses import dataclass

from app.engine.kv_sizing import CPU_SHARE, CUDA_SHARE

GIB = 2**30
CPU = "cpu"


@dataclass(frozen=True)
class Device:
    name: str
    memory_bytes: int
    bandwidth: float  # bytes a second, read from that memory
    flops: float  # a second, dense, bf16: what products are taken in, of FP8 weights as well
    reads_fp8: bool = True  # its kernels widen FP8 weights as they read them; else these are expanded when loaded
    layer_overhead_s: float = 0.0  # of a pass beside reading and computing: launches, collectives

    @property
    def is_gpu(self) -> bool:
        return self.name != CPU

    @property
    def runtime_bytes(self) -> int:
        """Taken by a process itself: context, libraries' workspaces, buffers of collectives, torch."""
        return (3 * GIB) // 2 if self.is_gpu else GIB // 2

    def available_bytes(self, weight_bytes: int, num_processes: int = 1) -> int:
        """What a KV pool and a step's activations may take, by the engine's own rule."""
        free = self.memory_bytes - num_processes * self.runtime_bytes - weight_bytes
        return int(free - (1 - CUDA_SHARE) * self.memory_bytes if self.is_gpu else CPU_SHARE * free)


# NVIDIA's data sheets of each product (SXM where there are several), rates "with sparsity" halved. Memory is what
# the driver leaves to programs, some percent below the number in the name. FP8 begins with compute capability 8.9.
DEVICES = {
    device.name: device
    for device in (
        Device("b200", 178 * GIB, 8.0e12, 2250e12),
        Device("h200", 139 * GIB, 4.8e12, 989e12),
        Device("h100", 79 * GIB, 3.35e12, 989e12),
        Device("h20", 95 * GIB, 4.0e12, 148e12),
        Device("a100", 79 * GIB, 2.039e12, 312e12, reads_fp8=False),
        Device("a100-40g", 39 * GIB, 1.555e12, 312e12, reads_fp8=False),
        Device("l40s", 44 * GIB, 0.864e12, 362e12),
        Device("l4", 22 * GIB, 0.3e12, 121e12),
        Device("a10g", 22 * GIB, 0.6e12, 70e12, reads_fp8=False),
        Device("rtx4090", int(23.5 * GIB), 1.008e12, 165e12),
        # A laptop: two channels of DDR5-5600 read at two thirds of their 90 GB/s; eight cores with AVX2.
        Device(CPU, 16 * GIB, 60e9, 0.6e12, reads_fp8=False),
    )
}


def choose_device(name: str | None, accelerator_type: str | None, configured: str) -> Device:
    """The one named; else the one that the Serve file asks Ray for; else the CPU, where it may be used.

    Raises ValueError for an unknown name, or none where there must be one.
    """
    if name is not None:
        if name not in DEVICES:
            raise ValueError(f"--device is {name}: choose from {', '.join(DEVICES)}")
        return DEVICES[name]
    if accelerator_type is not None:
        asked = accelerator_type.lower().replace("a100-80g", "a100")
        if asked not in DEVICES:
            raise ValueError(
                f"accelerator_type is {accelerator_type}, of which there are no figures: give --device, one of "
                f"{', '.join(DEVICES)}"
            )
        return DEVICES[asked]
    if configured == "cuda":
        raise ValueError(f"device is cuda, and which GPU is not said: give --device, one of {', '.join(DEVICES)}")
    return DEVICES[CPU]
