"""Texts that tokenizers are known to differ on."""

from __future__ import annotations

HARD_TEXTS = (
    "",
    " ",
    "Hello world",
    " leading, trailing ",
    "1234567890 12 3.14 1,000 1st",
    "a1b22c333",
    "½ ² Ⅳ ٣٤٥ 五 №5 ㈱ ㍿",
    "🦙🚀😶‍🌫️ 👨‍👩‍👧‍👦 🇫🇷 ☺️ 👍🏽",
    "我想在apple工作1314151天～ 日本語のテスト 한국어",
    "สวัสดีชาวโลก น้ำ ทำ",
    "مرحبا بالعالم هَذَا नमस्ते दुनिया Cửa Việt",
    "\x01\x02\x1f\x7f\x85\u200b\u200d\ufeff\u2028\u2029",
    "\t\t  \n\n \r\n x\n\n\n",
    "  two  spaces   three\u00a0nbsp\u3000ideographic\u2003em",
    " " * 200 + "x" + " " * 7,
    "\n" * 33,
    "a" * 300 + "!" * 65 + "=" * 129,
    "def f(x):\n\treturn x**2  # squared\n\n\n    if y != {'k': [1]}:\n        pass\n",
    "y'all 'S 'LL it's I'm don’t 'ſ",
    "é e\u0301 Å A\u030a \u1100\u1161\u11a8 각 か\u3099 が ｶﾞ",
    "ＡＢＣ１２３ ｱｲｳ ﬁne ﬂow Ⅻ ™ ℌ",
    "İstanbul ıI ßẞ ŉ Ǆǅǆ ΣΑΣ",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>x<|im_start </s >< s> [CLS ] <0x41> <0x0A>",
    "https://example.org/?q=a%20b&c=d#e mail@example.org",
    "▁ a▁b ▁▁c ▁",
    "\U0010ffff \ue000 \U000e0001 𝔘𝔫𝔦 𐍈 𠜎",
    "“quotes” — dashes… ‘single’ «fr» ¿es? §1",
)
