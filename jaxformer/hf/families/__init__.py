"""The published families that are read and written, one table each."""

from jaxformer.hf.families import bart, bert, deepseek, gemma, gpt, llama, mixtral, t5
from jaxformer.hf.family import Family

FAMILIES: dict[str, Family] = {
    name: family
    for module in (llama, gemma, gpt, bert, bart, t5, mixtral, deepseek)
    for name, family in module.FAMILIES.items()
}
"""``model_type`` of config.json -> its family. Loading and saving look families up here at every call: another is added by
``jf.hf.FAMILIES["its_model_type"] = Family(...)`` (see ``Family``). Where several can express a model, the first is saved."""
