"""DeepSeek-V3 and its MTP modules written out: whole sequences in fp32, token by token where it is plainer.

No cache, no batch, no kernels and nothing of ours: the checkpoint's tensors and the report's equations (arXiv
2412.19437, sections 2.1 and 2.2), for checkpoints with `q_lora_rank`, plain RoPE or YaRN and no biases.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

Tensor = torch.Tensor


class DirectDeepseek:
    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}

    def hidden_states(self, token_ids: list[int], is_normed: bool = True) -> Tensor:
        """After the final norm, or before it: [num_tokens, hidden_size]."""
        x = self.tensors["model.embed_tokens.weight"][token_ids]
        for layer in range(self.config["num_hidden_layers"]):
            x = self.decoder_layer(f"model.layers.{layer}.", x, is_dense=layer < self.config["first_k_dense_replace"])
        return self.norm("model.norm", x) if is_normed else x

    def logits(self, token_ids: list[int]) -> Tensor:
        return self.hidden_states(token_ids) @ self.tensors["lm_head.weight"].T

    def module_outputs(
        self,
        module: int,
        token_ids: list[int],  # of row p: token p + 1, or of a later module p + 1 + module
        hidden_states: Tensor,  # [num_rows, hidden_size]; row p stands at position p
    ) -> Tensor:
        """Before the module's norm: [num_rows, hidden_size]."""
        prefix = self.module_prefix(module)
        embedded = self.tensors[f"{prefix}embed_tokens.weight"][token_ids].clone()
        embedded[0] = 0
        joined = torch.cat((self.norm(f"{prefix}enorm", embedded), self.norm(f"{prefix}hnorm", hidden_states)), dim=-1)
        return self.decoder_layer(prefix, joined @ self.tensors[f"{prefix}eh_proj.weight"].T, is_dense=False)

    def recycled(self, module: int, outputs: Tensor) -> Tensor:
        return self.norm(f"{self.module_prefix(module)}shared_head.norm", outputs)

    def draft_logits(self, module: int, outputs: Tensor) -> Tensor:
        head = self.tensors[f"{self.module_prefix(module)}shared_head.head.weight"]
        return self.recycled(module, outputs) @ head.T

    def module_prefix(self, module: int) -> str:
        return f"model.layers.{self.config['num_hidden_layers'] + module}."

    def decoder_layer(self, prefix: str, x: Tensor, is_dense: bool) -> Tensor:
        x = x + self.attention(f"{prefix}self_attn.", self.norm(f"{prefix}input_layernorm", x))
        normed = self.norm(f"{prefix}post_attention_layernorm", x)
        return x + (self.mlp(f"{prefix}mlp.", normed) if is_dense else self.experts(f"{prefix}mlp.", normed))

    def attention(self, prefix: str, x: Tensor) -> Tensor:
        """Equations 1 to 11, with keys and values of every head written out."""
        config, weight = self.config, self._weight(prefix)
        heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        query = self.norm(f"{prefix}q_a_layernorm", x @ weight("q_a_proj").T, eps=1e-6) @ weight("q_b_proj").T
        query = query.view(len(x), heads, nope + rope)
        latent, key_rope = (x @ weight("kv_a_proj_with_mqa").T).split((config["kv_lora_rank"], rope), dim=-1)
        expanded = self.norm(f"{prefix}kv_a_layernorm", latent, eps=1e-6) @ weight("kv_b_proj").T
        expanded = expanded.view(len(x), heads, nope + config["v_head_dim"])
        key_rope = self.rotate(key_rope)
        outputs = []
        for head in range(heads):
            queries = torch.cat((query[:, head, :nope], self.rotate(query[:, head, nope:])), dim=-1)
            keys = torch.cat((expanded[:, head, :nope], key_rope), dim=-1)
            scores = queries @ keys.T / (nope + rope) ** 0.5 * self.yarn_scale("mscale_all_dim") ** 2
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            outputs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ expanded[:, head, nope:])
        return torch.cat(outputs, dim=-1) @ weight("o_proj").T

    def rotate(self, x: Tensor) -> Tensor:
        """Rows at positions 0, 1, ...; pairs (2i, 2i + 1) as complex numbers, turned."""
        angles = torch.outer(torch.arange(len(x), dtype=torch.float32), self.frequencies(x.shape[-1]))
        length = self.yarn_scale("mscale") / self.yarn_scale("mscale_all_dim")
        turned = torch.view_as_complex(x.reshape(len(x), -1, 2)) * torch.polar(torch.full_like(angles, length), angles)
        return torch.view_as_real(turned).flatten(1)

    def frequencies(self, dim: int) -> Tensor:
        """Radians a position; with YaRN (arXiv 2309.00071, section 3.2) those of few turns are stretched."""
        rope = self.config["rope_parameters"]
        theta, frequencies = rope["rope_theta"], []
        for pair in range(dim // 2):
            frequency = theta ** (-2 * pair / dim)
            if rope.get("rope_type") == "yarn":
                original = rope["original_max_position_embeddings"]
                # The pair that turns so often over the original context, and how far this one lies between the two.
                low, high = (
                    dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
                    for turns in (rope["beta_fast"], rope["beta_slow"])
                )
                low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
                stretched = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
                frequency = frequency / rope["factor"] * stretched + frequency * (1 - stretched)
            frequencies.append(frequency)
        return torch.tensor(frequencies)

    def yarn_scale(self, name: str) -> float:
        rope = self.config["rope_parameters"]
        return 0.1 * rope[name] * math.log(rope["factor"]) + 1 if rope.get("rope_type") == "yarn" else 1.0

    def experts(self, prefix: str, x: Tensor) -> Tensor:
        """Equations 12 to 16, one token and one expert at a time."""
        config, shared = self.config, self.mlp(f"{prefix}shared_experts.", x)
        outputs = []
        for row in range(len(x)):
            scores = torch.sigmoid(self.tensors[f"{prefix}gate.weight"] @ x[row])
            choice = (scores + self.tensors[f"{prefix}gate.e_score_correction_bias"]).view(config["n_group"], -1)
            groups = choice.sort(dim=-1, descending=True).values[:, :2].sum(-1)
            allowed = groups.sort(descending=True).indices[: config["topk_group"]].tolist()
            choice = torch.stack([c if g in allowed else torch.full_like(c, -torch.inf) for g, c in enumerate(choice)])
            chosen = choice.flatten().sort(descending=True).indices[: config["num_experts_per_tok"]].tolist()
            total = sum(scores[expert] for expert in chosen) if config["norm_topk_prob"] else 1.0
            outputs.append(
                sum(scores[expert] / total * self.mlp(f"{prefix}experts.{expert}.", x[row]) for expert in chosen)
                * config["routed_scaling_factor"]
            )
        return torch.stack(outputs) + shared

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        weight = self._weight(prefix)
        gate = x @ weight("gate_proj").T
        return (gate * torch.sigmoid(gate) * (x @ weight("up_proj").T)) @ weight("down_proj").T

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        eps = self.config["rms_norm_eps"] if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.tensors[f"{name}.weight"]

    def _weight(self, prefix: str):
        return lambda name: self.tensors[f"{prefix}{name}.weight"]
