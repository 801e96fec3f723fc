"""Where text is cut, judged by llama.cpp.

The pieces are what `unicode_regex_split` of llama.cpp (0c1e57098, src/unicode.cpp) gives for the
expressions that src/llama-vocab.cpp has under these names. There, gpt-4o and tekken only come near
the models' own expressions where letters are not ASCII; their pieces of MARKS are what the models'
own, which stand beside them as comments, find in Python's `regex`.
"""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers

from edgellm.export.pre_tokenizers import PRE_TOKENIZERS

CUT = "¦"
# Names, then the pieces of two texts.
PIECES = [
    (
        "default",
        "I¦'¦VE¦ can¦'¦t¦ it¦'¦sa¦ ¦123¦45¦ iPhone¦6¦ HTTPServer¦,¦x¦\n\n ¦ y¦=¦3¦;¦  ¦"
        "<=>¦ `¦a¦|¦b¦`¦ ¦½Ⅷ¦ ¦~$¦7¦ ¦#¦include¦ a¦/¦b¦/¦\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ ¦«¦q¦»¦"
        "\t¦\t¦end¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<¦sentinel¦:¦3¦>¦IMGIMGABZ¦   ",
        "ह¦ि¦न¦्¦द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301¦t¦\u00a0¦été¦ éÉa¦  ",
    ),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4",
        "I¦'¦VE¦ can¦'t¦ it¦'s¦a¦ 12345¦ iPhone¦6¦ HTTPServer¦,¦x¦\n\n ¦ y¦=¦3¦;¦ ¦ <=>"
        "¦ `¦a¦|¦b¦`¦ ½Ⅷ¦ ~$¦7¦ #¦include¦ a¦/¦b¦/¦\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\t¦en"
        "d¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<¦sentinel¦:¦3¦>¦IMGIMGABZ¦   ",
        "ह¦ि¦न¦्¦द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301¦t¦\u00a0¦été¦ éÉa¦  ",
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        "I¦'¦VE¦ can¦'t¦ it¦'s¦a¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,¦x¦\n\n ¦ y¦=¦3¦;¦ "
        "¦ <=>¦ `¦a¦|¦b¦`¦ ¦½¦Ⅷ¦ ~$¦7¦ #¦include¦ a¦/¦b¦/¦\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦"
        "\t¦\t¦end¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<¦sentinel¦:¦3¦>¦IMGIMGABZ¦   ",
        "ह¦ि¦न¦्¦द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301¦t¦\u00a0¦été¦ éÉa¦  ",
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano "
        "dbrx smaug-bpe chatglm-bpe glm4 glm5",
        "I¦'VE¦ can¦'t¦ it¦'s¦a¦ ¦123¦45¦ iPhone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦ <="
        ">¦ `¦a¦|b¦`¦ ¦½Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\tend¦"
        ".)¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "ह¦िन¦्द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open megrez kormo f2llmv2 grok-2",
        "I¦'VE¦ can¦'t¦ it¦'s¦a¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦"
        " <=>¦ `¦a¦|b¦`¦ ¦½¦Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\t"
        "end¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "ह¦िन¦्द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "qwen35",
        "I¦'VE¦ can¦'t¦ it¦'s¦a¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦"
        " <=>¦ `¦a¦|b¦`¦ ¦½¦Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\t"
        "end¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "हिन्दी¦ ไทย¦ ค่¦ e\u0301t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "laguna",
        "I¦'VE¦ can¦'t¦ it¦'s¦a¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦"
        " <=>¦ `¦a¦|b¦`¦ ¦½¦Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/\r¦\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦"
        "\tend¦.)¦ ¦\n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "ह¦िन¦्द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "ufakzeka",
        "I¦'VE¦ can¦'t¦ it¦'sa¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦ "
        "<=>¦ `¦a¦|b¦`¦ ¦½¦Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\te"
        "nd¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "ह¦िन¦्द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "minicpm5",
        "I¦'VE¦ can¦'t¦ it¦'s¦a¦ ¦123¦45¦ iPhone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦ <="
        ">¦ `¦a¦|b¦`¦ ¦½Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\tend¦"
        ".)¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "ह¦िन¦्द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        "I¦'VE¦ can¦'t¦ it¦'s¦a¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦"
        " <=>¦ `¦a¦|b¦`¦ ¦½¦Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\t"
        "end¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "ह¦िन¦्द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "seed-coder",
        "I¦'VE¦ can¦'t¦ it¦'s¦a¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦"
        " <=>¦ `¦a¦|b¦`¦ ¦½¦Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/¦\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦"
        "\tend¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "ह¦िन¦्द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "exaone-moe",
        "I¦'VE¦ can¦'t¦ it¦'s¦a¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦"
        " <=>¦ `¦a¦|b¦`¦ ¦½¦Ⅷ¦ ~$¦7¦ #¦include a¦/b¦/\r¦\n¦ 中文ひら 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\te"
        "nd¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "हिन्दी ไทย ค่ e\u0301t¦\u00a0été éÉa¦  ",
    ),
    (
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        "I'VE¦ can't¦ it's¦a¦ ¦123¦45¦ i¦Phone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦ <=>¦"
        " `¦a¦|b¦`¦ ¦½Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\tend¦.)"
        "¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "हिन्दी¦ ไทย¦ ค่¦ e\u0301t¦\u00a0été¦ é¦Éa¦  ",
    ),
    (
        "tekken",
        "I¦'VE¦ can¦'t¦ it¦'sa¦ ¦1¦2¦3¦4¦5¦ i¦Phone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦"
        " <=>¦ `¦a¦|b¦`¦ ¦½¦Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\t"
        "end¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "हिन्दी¦ ไทย¦ ค่¦ e\u0301t¦\u00a0été¦ é¦Éa¦  ",
    ),
    (
        "deepseek-llm",
        "I¦'¦VE¦ can¦'¦t¦ it¦'¦sa¦ ¦12345¦ iPhone¦6¦ HTTPServer¦,¦x¦\n¦\n¦ ¦ y¦=¦3¦;¦ ¦"
        " <=>¦ `¦a¦|¦b¦`¦ ¦½¦Ⅷ¦ ~$¦7¦ #¦include¦ a¦/¦b¦/¦\r¦\n¦ ¦中文ひら¦ ¦한글¦!?¦ 👍 «¦q¦»¦"
        "\t¦\tend¦.)¦ ¦\n¦\n¦\n¦\n¦ z¦              ¦ x¦<¦sentinel¦:¦3¦>¦IMGIMGABZ¦   ",
        "हिन्दी¦ ¦ไทย¦ ¦ค่¦ e¦\u0301¦t¦\u00a0é¦t¦é¦ éÉ¦a¦  ",
    ),
    (
        "deepseek-coder",
        "I¦'¦VE¦ can¦'¦t¦ it¦'¦sa¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,¦x¦\n¦\n¦ ¦ y¦=¦3¦"
        ";¦  <=> `¦a¦|¦b¦` ¦½¦Ⅷ¦ ~$¦7¦ #¦include¦ a¦/¦b¦/¦\r¦\n¦ ¦中文ひら¦ ¦한글¦!?¦ 👍¦ «¦q¦"
        "»¦\t¦\tend¦.)¦ ¦\n¦\n¦\n¦\n¦ z¦              ¦ x¦<¦sentinel¦:¦3¦>¦IMGIMGABZ¦  "
        " ",
        "ह¦ि¦न¦्¦द¦ी¦ ¦ไทย¦ ¦ค¦่¦ e¦\u0301¦t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        "I¦'VE¦ can¦'t¦ it¦'sa¦ ¦123¦45¦ iPhone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦ <=>"
        "¦ `¦a¦|b¦`¦ ¦½Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/\r\n¦ ¦中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\tend¦"
        ".)¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "हिन्दी¦ ไทย¦ ค่¦ e\u0301t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "spark2_5",
        "I¦'VE¦ can¦'t¦ it¦'sa¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,x¦\n¦\n¦ ¦ y¦=¦3¦;¦ ¦"
        " <=>¦ `¦a¦|b¦`¦ ¦½¦Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/¦\r¦\n¦ ¦中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t"
        "¦\tend¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦   ",
        "हिन्दी¦ ไทย¦ ค่¦ e\u0301t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "falcon",
        "I¦'¦VE¦ can¦'¦t¦ it¦'¦sa¦ ¦123¦45¦ iPhone¦6¦ HTTPServer¦,¦x¦\n\n ¦ y¦=¦3¦;¦  ¦"
        "<=>¦ ¦`¦a¦|¦b¦`¦ ½Ⅷ¦ ¦~$¦7¦ ¦#¦include¦ a¦/¦b¦/¦\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ ¦«¦q¦»¦"
        "\t¦\t¦end¦.)¦ \n\n\n\n¦ z¦              ¦ x¦<¦sentinel¦:¦3¦>¦IMGIMGABZ¦   ",
        "ह¦ि¦न¦्¦द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301¦t¦\u00a0¦été¦ éÉa¦  ",
    ),
    (
        "jais-2",
        "I¦'VE¦ can¦'t¦ it¦'s¦a¦ ¦123¦45¦ iPhone¦6¦ HTTPServer¦,x¦\n\n¦ ¦ y¦=¦3¦;¦ ¦ <="
        ">¦ `¦a¦|b¦`¦ ¦½Ⅷ¦ ~$¦7¦ #¦include¦ a¦/b¦/\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «¦q¦»¦\t¦\tend¦"
        ".)¦ \n\n\n\n¦ z¦        ¦    ¦  ¦ x¦<sentinel¦:¦3¦>IMGIMGABZ¦  ¦ ",
        "ह¦िन¦्द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301t¦\u00a0été¦ éÉa¦  ",
    ),
    (
        "bloom poro-chat gpt3-finnish",
        "I'VE¦ can't¦ it'sa¦ 12345¦ iPhone6¦ HTTPServer¦,¦x¦\n\n ¦ y=3;¦ ¦ <=>¦ `a¦|¦b`"
        "¦ ½Ⅷ¦ ~$7¦ #include¦ a/b/¦\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «q»¦\t\t¦end¦.) \n\n\n\n¦ z¦  "
        "            ¦ x<sentinel:3>IMGIMGABZ¦   ",
        "हिन्दी¦ ไทย¦ ค่¦ e\u0301t¦\u00a0¦été¦ éÉa¦  ",
    ),
    (
        "viking",
        "I'VE¦ can't¦ it'sa¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,¦x¦\n\n ¦ y=¦3¦;¦ ¦ <=>¦"
        " `a¦|¦b`¦ ¦½¦Ⅷ¦ ~$¦7¦ #include¦ a/b/¦\r\n¦ 中文ひら¦ 한글¦!?¦ 👍¦ «q»¦\t\t¦end¦.) \n"
        "\n\n\n¦ z¦              ¦ x<sentinel:¦3¦>IMGIMGABZ¦   ",
        "हिन्दी¦ ไทย¦ ค่¦ e\u0301t¦\u00a0¦été¦ éÉa¦  ",
    ),
    (
        "chameleon",
        "I¦'¦VE¦ can¦'¦t¦ it¦'¦sa¦ ¦1¦2¦3¦4¦5¦ iPhone¦6¦ HTTPServer¦,¦x¦\n¦\n¦  ¦y¦=¦3¦"
        ";¦  ¦<¦=¦>¦ ¦`¦a¦|¦b¦`¦ ¦½¦Ⅷ¦ ¦~¦$¦7¦ ¦#¦include¦ a¦/¦b¦/¦\r¦\n¦ 中文ひら¦ 한글¦!¦?¦"
        " 👍¦ ¦«¦q¦»¦\t¦\t¦end¦.¦)¦ ¦\n¦\n¦\n¦\n¦ z¦    ¦    ¦    ¦  ¦ x¦<¦sentinel¦:¦3¦"
        ">¦IMGIMGABZ¦  ¦ ",
        "ह¦ि¦न¦्¦द¦ी¦ ไทย¦ ค¦่¦ e¦\u0301¦t¦\u00a0¦été¦ éÉa¦  ",
    ),
]


@pytest.mark.parametrize(("names", "text", "marks"), PIECES)
def test_text_is_cut_as_by_llama_cpp(names: str, text: str, marks: str) -> None:
    for name in names.split():
        cuts = [
            pre_tokenizers.Split(Regex(pattern), "isolated")
            for pattern in PRE_TOKENIZERS[name].patterns
        ]
        cut = pre_tokenizers.Sequence(cuts)
        for pieces in (text, marks):
            found = [piece for piece, _ in cut.pre_tokenize_str(pieces.replace(CUT, ""))]
            assert found == pieces.split(CUT), name


def test_every_pre_tokenizer_is_judged() -> None:
    names = [name for names, _, _ in PIECES for name in names.split()]
    assert sorted(names) == sorted(PRE_TOKENIZERS)


def test_flags_are_those_of_llama_cpp() -> None:
    whole = {name for name, kind in PRE_TOKENIZERS.items() if kind.whole_words}
    bos = {name for name, kind in PRE_TOKENIZERS.items() if kind.add_bos}
    names = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    llama3 = set(names.split())
    assert whole == llama3 | {"minicpm5", "glm4", "glm5", "tekken"}
    assert bos == llama3 | {"tekken", "chameleon"}
