# SPDX-License-Identifier: Apache-2.0
"""WUSH-A: sensitivities that know where attention looks.

With p the causal softmax and o = sum_s p_s v_s the output of a query, an error e of
key s moves a query head's output by p_s (v_s - o) (q . e) / sqrt(d), an error of value
s by p_s times it; the layer's output sums that over the query heads of the KV head,
through its output projection (arXiv 2609.38121, appendix C). The sums over s are sums
of products of matrices, so no tensor is larger than tokens x tokens:

    sum_s pp (v_s - a)^T G (v_s - b)
        = sum_s pp v_s^T G v_s - a^T G m - m^T G b + (sum_s pp) a^T G b

with pp the product of two heads' probabilities, m = sum_s pp v_s, and a and b their
outputs.
"""

import torch


def aware_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    output: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sensitivities of one KV head's keys and values to a sequence.

    Args:
        query: `[group, tokens, head_dim]` after RoPE.
        key: `[tokens, head_dim]` after RoPE.
        value: Like `key`.
        scale: Of the softmax.
        output: `[group, head_dim, hidden]`, each query head's rows of the output
            projection.

    Returns:
        Two matrices `[head_dim, head_dim]` fp64, constant factors left out.

    """
    query, key, value = query.float(), key.float(), value.float()
    tokens, head_dim = key.shape
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    scores = query @ key.T * scale
    probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
    outputs = probabilities @ value
    key_sum = torch.zeros(head_dim, head_dim, dtype=torch.float64)
    value_sum = torch.zeros_like(key_sum)
    for one in range(len(query)):
        for other in range(one, len(query)):
            gram = output[one].double() @ output[other].double().T
            products = probabilities[one] * probabilities[other]
            weights = _weights(
                products, value, outputs[one], outputs[other], gram.float()
            )
            part = (query[one] * weights.unsqueeze(-1)).double().T @ query[
                other
            ].double()
            total = products.sum(dtype=torch.float64)
            # A pair of different heads is there twice, once in each order.
            key_sum += part if one == other else part + part.T
            value_sum += total * (gram if one == other else gram + gram.T)
    return key_sum, value_sum


def _weights(
    products: torch.Tensor,
    value: torch.Tensor,
    one: torch.Tensor,
    other: torch.Tensor,
    gram: torch.Tensor,
) -> torch.Tensor:
    """Return the sum over keys of what an error of a score does, `[tokens]` fp32."""
    square = ((value @ gram) * value).sum(-1)
    mean = products @ value
    return (
        products @ square
        - ((mean @ gram) * other).sum(-1)
        - ((one @ gram) * mean).sum(-1)
        + products.sum(-1) * ((one @ gram) * other).sum(-1)
    )
