"""What the classes of tokenizers mean that tokenizer_config.json names: data, one row a class.

SentencePiece numbers its pieces as they stand in its file; fairseq put four tokens of its own first
(https://github.com/facebookresearch/fairseq/blob/main/fairseq/data/dictionary.py), Pegasus 105.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy "
    "id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru "
    "sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
# language_codes of tokenizer_config.json -> the languages, in the order of their ids (https://arxiv.org/abs/2010.11125).
LANGUAGE_CODES = {"m2m100": _M2M100.split(), "wmt21": ["en", "ha", "is", "ja", "cs", "ru", "zh", "de"]}

_MBART50 = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN "
    "pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")  # in place of SentencePiece's <unk> <s> </s>
PEGASUS = ("<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, 103)))


@dataclass(frozen=True)
class Layout:
    """How a class numbers tokens, and what it puts round a text.

    `first` stand in place of the first `replaced` pieces; `last` follow the pieces. `before` and `after`: "bos", "eos",
    "cls", "sep" or "language", or None. With a `bos_default`, add_bos_token and add_eos_token switch them; without
    these keys it says whether `before` is there.
    """

    first: tuple[str, ...] = ()
    replaced: int = 0
    last: tuple[str, ...] = ()
    before: str | None = None
    after: str | None = None
    bos_default: bool | None = None
    extra_ids: bool = False  # as many <extra_id_N> follow, the highest first
    names: dict[str, str] = field(default_factory=dict)  # tokens that the configuration may leave out


_ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_MARKS = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
_BRACKETS = {
    "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]",
}  # fmt: skip
_LLAMA = Layout(before="bos", bos_default=True, names=_ENDS)
_T5 = Layout(after="eos", extra_ids=True, names={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"})

# Classes with a SentencePiece model, without "Fast".
SENTENCEPIECE: dict[str, Layout] = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "GemmaTokenizer": Layout(
        before="bos",
        bos_default=True,
        names={"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    ),
    "BertGenerationTokenizer": Layout(names=_ENDS | {"pad_token": "<pad>"}),
    "T5Tokenizer": _T5,
    "MT5Tokenizer": _T5,
    "PegasusTokenizer": Layout(PEGASUS, 2, after="eos", names={"eos_token": "</s>", "unk_token": "<unk>"}),
    "XLMRobertaTokenizer": Layout(FAIRSEQ, 3, ("<mask>",), "cls", "sep", names=_ENDS | _MARKS),
    "XGLMTokenizer": Layout(
        FAIRSEQ, 3, tuple(f"<madeupword{i}>" for i in range(7)), before="sep", names=_ENDS | _MARKS
    ),
    "MBart50Tokenizer": Layout(
        FAIRSEQ, 3, (*_MBART50.split(), "<mask>"), "language", "eos", names=_ENDS | _MARKS | {"src_lang": "en_XX"}
    ),
    # Its 202 languages stand in the configuration.
    "NllbTokenizer": Layout(FAIRSEQ, 3, (), "language", "eos", names=_ENDS | _MARKS | {"src_lang": "eng_Latn"}),
}

# Classes whose ids are in vocab.json, and whose texts SentencePiece cuts.
WITH_VOCAB: dict[str, Layout] = {
    "MarianTokenizer": Layout(after="eos", names={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}),
    "M2M100Tokenizer": Layout(before="language", after="eos", names=_ENDS | _MARKS | {"src_lang": "en"}),
}

_GPT2 = Layout(
    before="bos", bos_default=False, names=dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
)
_ROBERTA = Layout(before="cls", after="sep", names=_ENDS | _MARKS | {"mask_token": "<mask>"})

# Classes with vocab.json and merges.txt: byte-level BPE.
MERGES: dict[str, Layout] = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "RobertaTokenizer": _ROBERTA,
    "BartTokenizer": _ROBERTA,
    "LongformerTokenizer": _ROBERTA,
    "LEDTokenizer": _ROBERTA,
    "BlenderbotTokenizer": Layout(after="eos", names=_ENDS | _MARKS | {"mask_token": "<mask>"}),
}

# Classes with vocab.txt: WordPiece.
WORDPIECE: dict[str, Layout] = dict.fromkeys(
    ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "ConvBertTokenizer", "MobileBertTokenizer"),
    Layout(before="cls", after="sep", names=_BRACKETS),
)

# model_type of config.json -> the class, where no file names one.
CLASS_OF = {
    "llama": "LlamaTokenizer",
    "mistral": "LlamaTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "t5": "T5Tokenizer",
    "mt5": "MT5Tokenizer",
    "umt5": "T5Tokenizer",
    "pegasus": "PegasusTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "xglm": "XGLMTokenizer",
    "marian": "MarianTokenizer",
    "m2m_100": "M2M100Tokenizer",
    "gpt2": "GPT2Tokenizer",
    "opt": "GPT2Tokenizer",
    "roberta": "RobertaTokenizer",
    "bart": "BartTokenizer",
    "blenderbot": "BlenderbotTokenizer",
    "bert": "BertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "electra": "ElectraTokenizer",
}
