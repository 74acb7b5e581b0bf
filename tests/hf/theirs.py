"""Small models of transformers' classes, with weights away from their initial values."""

import torch
import transformers

SMALL = {"vocab_size": 60, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def theirs_of(model_type, **options):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**{**SMALL, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():  # away from ones and zeros, which would hide slips
            p.add_(0.2 * torch.randn_like(p))
    return model


def distance(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()
