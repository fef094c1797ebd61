"""Writes a quantised GGUF file's weights out in 16 bits, for peers that read GGUF: the weights of our own conversion.

python benchmarks/peers/expand_gguf.py MODEL.Q4_1.gguf MODEL.bf16.gguf bf16     for llama.cpp
python benchmarks/peers/expand_gguf.py MODEL.Q4_1.gguf MODEL.f16.gguf f16       for OpenVINO, which reads no bf16:
                                                                                the same values, rounded to bf16 first
"""

import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType

WRITTEN_BY_THE_WRITER = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
FILE_TYPES = {"bf16": LlamaFileType.MOSTLY_BF16, "f16": LlamaFileType.MOSTLY_F16}
BF16 = GGMLQuantizationType.BF16


def expand(source: str, out: str, type_name: str) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(WRITTEN_BY_THE_WRITER):
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(FILE_TYPES[type_name])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        bits = gguf.quantize(values, BF16)
        if tensor.tensor_type == GGMLQuantizationType.F32:  # norms
            writer.add_tensor(tensor.name, values)
        elif type_name == "bf16":
            writer.add_tensor(tensor.name, bits, raw_dtype=BF16)
        else:
            writer.add_tensor(tensor.name, gguf.dequantize(bits, BF16).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    expand(*sys.argv[1:4])
    print(f"{sys.argv[2]} written")
