//! Templates render as HF's jinja environment renders them.

use std::path::PathBuf;

use rstest::rstest;
use tempfile::TempDir;

use super::*;

fn render(source: &str) -> Result<String> {
    let template = ChatTemplate { path: PathBuf::from("chat_template.jinja"), source: source.into() };
    let special = [("bos_token", "<s>".to_owned()), ("eos_token", "</s>".to_owned())];
    template.render_with(&special, &[Message::user("Hi <b>\"é\""), Message::assistant("Yo")], true)
}

/// Expected texts are jinja2 3.1.6's in the environment that HF builds.
#[rstest]
#[case("{{ bos_token }}{{ messages[0]['content'] }}", "<s>Hi <b>\"é\"")]
#[case(
    "{% for m in messages %}\n  {% if loop.last %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\nend\n",
    "assistant\nend"
)]
#[case("{{ messages[0].content | tojson }}", "\"Hi <b>\\\"é\\\"\"")]
#[case("{{ {'a': [1, 2.5, none, true], 'b': {}} | tojson }}", "{\"a\": [1, 2.5, null, true], \"b\": {}}")]
#[case("{{ {'a': [1]} | tojson(indent=2) }}", "{\n  \"a\": [\n    1\n  ]\n}")]
#[case("{{ 'é' | tojson(ensure_ascii=true) }}", "\"\\u00e9\"")]
#[case("{{ 'a,b'.split(',')[1].upper().strip() }}", "B")]
#[case("{% if messages[0].content.startswith('Hi') %}y{% endif %}", "y")]
#[case("{% for k, v in messages[1].items() %}{{ k }}={{ v }};{% endfor %}", "role=assistant;content=Yo;")]
#[case("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2")]
#[case("{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user")]
#[case("{{ date_string }} {{ strftime_now('%d %b %Y') }}", "26 Jul 2024 26 Jul 2024")]
#[case("{% if tools is none and documents is none %}none{% endif %}{% if foo is defined %}foo{% endif %}", "none")]
#[case(
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{% generation %}{{ m.content }}{% endgeneration %}{%- endif -%}{%- endfor -%}",
    "Yo"
)]
#[case("{% if add_generation_prompt %}go{% endif %}", "go")]
#[case("{{ messages | length }}{{ messages[-1]['content'] | trim }}", "2Yo")]
fn renders(#[case] source: &str, #[case] expected: &str) {
    assert_eq!(render(source).expect("renders"), expected);
}

#[rstest]
#[case("{{ raise_exception('only user turns') }}", "refused: chat template: it raised: only user turns")]
#[case("{% unknown_tag %}", "chat template, line 1")]
#[case("{% for m in messages %}", "chat template")]
#[case("{{ strftime_now('%Q') }}", "strftime_now: %Q")]
#[case("{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}", "chat template")]
fn refuses(#[case] source: &str, #[case] expected: &str) {
    let error = render(source).expect_err("cannot be rendered").to_string();
    assert!(error.contains(expected), "found {error:?}, expected {expected:?} in it");
}

#[rstest]
#[case(None, None, None)]
#[case(None, Some(r#"{"chat_template": "C"}"#), Some("C"))]
#[case(None, Some(r#"{"chat_template": null}"#), None)]
#[case(
    None,
    Some(r#"{"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}"#),
    Some("D")
)]
#[case(Some("J"), Some(r#"{"chat_template": "C"}"#), Some("J"))]
#[case(Some("{% unknown %}"), None, Some("{% unknown %}"))]
fn precedence(#[case] jinja: Option<&str>, #[case] config: Option<&str>, #[case] expected: Option<&str>) {
    let dir = TempDir::new().expect("a folder");
    for (file, text) in [("chat_template.jinja", jinja), ("tokenizer_config.json", config)] {
        if let Some(text) = text {
            std::fs::write(dir.path().join(file), text).expect("written");
        }
    }
    let template = ChatTemplate::open(dir.path()).expect("readable");
    assert_eq!(template.map(|t| t.source).as_deref(), expected);
}

#[rstest]
#[case(r#"{"chat_template": 3}"#, "chat_template: found another value")]
#[case(r#"{"chat_template": [{"name": "rag", "template": "R"}]}"#, "expected one named default")]
fn damaged(#[case] config: &str, #[case] expected: &str) {
    let dir = TempDir::new().expect("a folder");
    std::fs::write(dir.path().join("tokenizer_config.json"), config).expect("written");
    let error = ChatTemplate::open(dir.path()).expect_err("damaged").to_string();
    assert!(error.contains(expected), "{error}");
}
