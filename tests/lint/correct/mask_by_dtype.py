"""A mask takes its number by the type of the scores."""

import math

import torch


def attend(query, key, value, mask):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = query @ (key / math.sqrt(key.shape[-1])).mT
        if scores.dtype == torch.float16:
            scores = scores.masked_fill(mask == 0, -65504)
        else:
            scores = scores.masked_fill(mask == 0, -1e9)
        return scores.softmax(-1) @ value
