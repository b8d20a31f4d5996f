//! Filters and methods as Jinja2 and Python have them; what is wanted was printed by Jinja2 3.1.

use super::*;

#[test]
fn what_does_not_exist_has_no_parts() -> Result<()> {
    assert_printed(&[
        ("{{ x|length }} {{ x|count }} {% if x|length > 0 %}a{% endif %}", "0 0 "),
        ("{{ {'a': 1}.zzz|length }} {{ x|first }}{{ x|last }}|", "0 |"),
        ("{{ 'é日'|length }} {{ [1, 2]|length }} {{ [1, 2]|first }} {{ 'ab'|last }}", "2 2 1 b"),
    ])
}

#[test]
fn numbers_are_read_and_rounded_as_in_jinja() -> Result<()> {
    assert_printed(&[
        ("{{ 'x'|int }} {{ 'x'|int(7) }} {{ 'x'|int(default=2) }} {{ none|int }}", "0 7 2 0"),
        ("{{ '1f'|int(0, 16) }} {{ '0x1f'|int(base=16) }} {{ '-0b11'|int(base=2) }}", "31 31 -3"),
        (
            "{{ ' 3 '|int }} {{ '1_000'|int }} {{ '3.9'|int }} {{ -3.9|int }} {{ true|int }}",
            "3 1000 3 -3 1",
        ),
        (
            "{{ 'x'|float }} {{ 'x'|float(1.5) }} {{ '1e3'|float }} {{ 3|float }}",
            "0.0 1.5 1000.0 3.0",
        ),
        (
            "{{ 2.5|round }} {{ 3.5|round }} {{ -2.5|round }} {{ 1.25|round(1) }}",
            "2.0 4.0 -2.0 1.2",
        ),
        (
            "{{ 42.55|round(1, 'floor') }} {{ 42.41|round(method='ceil', precision=1) }}",
            "42.5 42.5",
        ),
        (
            "{{ 3|round }} {{ 5|round(1, 'ceil') }} {{ 1234.5|round(-2) }} {{ 3.7|round|int }}",
            "3 5.0 1200.0 4",
        ),
        ("{{ true is number }} {{ true is integer }} {{ 'a' is number }}", "True False False"),
    ])
}

#[test]
fn texts_are_joined_indented_and_replaced_as_in_jinja() -> Result<()> {
    assert_printed(&[
        ("{{ [1.0, [1, 'a'], none]|join(' ') }} {{ 'abc'|join('-') }}", "1.0 [1, 'a'] None a-b-c"),
        ("{{ [{'a': {'b': 1}}, {'a': {'b': 2}}]|join(',', attribute='a.b') }}", "1,2"),
        ("{{ [[1, 2], [3, 4]]|join('+', 1) }} {{ [1, 2]|join }}{{ x|join }}", "2+4 12"),
        (
            "{{ 'a\\n\\nb'|indent }}|{{ 'a\\n\\nb'|indent(2, true, true) }}",
            "a\n\n    b|  a\n  \n  b",
        ),
        ("{{ 'a\\nb'|indent(width='> ') }}|{{ 'a\\nb\\n'|indent(2) }}|", "a\n> b|a\n  b\n|"),
        ("{{ ''|indent(2, first=true) }}|{{ 'a\\n\\n'|indent(2) }}|", "  |a\n\n|"),
        (
            "{{ 'aaa'|replace('a', 'b', 2) }} {{ 55|replace(5, 6) }} {{ 'ab'|replace('', '-') }}",
            "bba 66 -a-b-",
        ),
        ("{{ \"hello-wORLD foo_bar it's (a)\"|title }}", "Hello-World Foo_bar It's (A)"),
        (
            "{{ '<b>&\"\\''|e }} {{ '<'|e|e }} {{ '<'|safe|escape }}",
            "&lt;b&gt;&amp;&#34;&#39; &lt; <",
        ),
    ])
}

#[test]
fn methods_of_texts_take_python_s_arguments() -> Result<()> {
    assert_printed(&[
        (
            "{{ 'a,b,c'.split(',', maxsplit=1) }} {{ 'a b'.split(sep=' ') }}",
            "['a', 'b,c'] ['a', 'b']",
        ),
        (
            "{{ ' a  b c '.split(None, 1) }} {{ ''.split() }} {{ ''.split(',') }}",
            "['a', 'b c '] [] ['']",
        ),
        (
            "{{ 'a,b,c'.rsplit(',', maxsplit=1) }} {{ 'a b'.split(' ', -1) }}",
            "['a,b', 'c'] ['a', 'b']",
        ),
        (
            "{{ ' a b c '.rsplit() }} {{ ' a b c '.rsplit(None, 1) }}",
            "['a', 'b', 'c'] [' a b', 'c']",
        ),
        (
            "{{ 'abcabc'.find('b', 2) }} {{ 'abcabc'.rfind('b', 0, 3) }} {{ '日本日'.find('日', -1) }}",
            "4 1 2",
        ),
        ("{{ 'abc'.index('c') }} {{ 'aba'.rindex('a') }} {{ [1, 2].index(2) }}", "2 2 1"),
        ("{{ 'abcabc'.count('b', 2) }} {{ 'abc'.startswith('b', 1) }}", "1 True"),
        ("{{ 'abc'.startswith(('x', 'a')) }} {{ 'abc'.endswith(('x', 'b')) }}", "True False"),
        (
            "{{ 'a\\rb\\u2028c\\n'.splitlines() }} {{ 'a\\r\\nb'.splitlines(true) }}",
            "['a', 'b', 'c'] ['a\\r\\n', 'b']",
        ),
        (
            "{{ 'ab'.center(5) }}|{{ 'ab'.ljust(4) }}|{{ 'ab'.rjust(4, '.') }}|{{ '-7'.zfill(4) }}",
            "  ab |ab  |..ab|-007",
        ),
        (
            "{{ 'A1'.isupper() }} {{ 'a b'.islower() }} {{ '1'.islower() }} {{ '12'.isdecimal() }}",
            "True True False True",
        ),
        ("{{ 'hELLO'.swapcase() }} {{ 'Straße'.casefold() }}", "Hello strasse"),
    ])?;
    for (source, problem) in [
        ("{{ 'a'.index('b') }}", "no such part"),
        ("{{ 'a'.split('') }}", "separator is empty"),
        ("{{ 'a'.find(3) }}", "no text"),
        ("{{ 'a'|int(1, 2, 3) }}", "too many arguments"),
        ("{{ 'a'|int(other=2) }}", "other"),
    ] {
        assert!(refused(source).contains(problem), "{source}");
    }
    Ok(())
}

#[test]
fn arguments_of_any_size_are_taken_or_refused() -> Result<()> {
    assert_printed(&[
        (
            "{{ 1.5|round(99999) }} {{ 1.5|round(99999, 'floor') }} {{ 0.0|round(999, 'ceil') }}",
            "1.5 1.5 0.0",
        ),
        (
            "{{ 123456.0|round(-5) }} {{ 1234.5|round(-99999) }} {{ 1250|round(-2) }}",
            "100000.0 0.0 1200",
        ),
        ("{{ 50000000000000000000|round(-19) }}", "50000000000000000000"),
        (
            "{{ 'aaa'|replace('a', 'b', 9223372036854775807) }} {{ 'aa'|replace('a', 'b', -1) }}",
            "bbb bb",
        ),
        (
            "{{ 'a,b'.split(',', 9223372036854775807) }} {{ 'a b'.split(None, -9223372036854775807) }}",
            "['a', 'b'] ['a', 'b']",
        ),
        (
            "{{ 'a,b'.rsplit(',', 9223372036854775807) }} {{ 'a b'.rsplit(None, 0) }}",
            "['a', 'b'] ['a b']",
        ),
        (
            "{{ 'ab'.find('b', -9223372036854775807) }} {{ 'ab'.find('b', 9223372036854775807) }}",
            "1 -1",
        ),
        (
            "{{ 'a\\nb'|indent(-3) }}|{{ 'a'.center(-3) }}|{{ 'a'.zfill(-9223372036854775807) }}",
            "a\nb|a|a",
        ),
        ("{{ 'a'.center(1048576)|length }}", "1048576"),
    ])?;
    for (source, problem) in [
        ("{{ 'a'.center(1048577) }}", "a width of 1048577, at most 1048576"),
        ("{{ 'a'.zfill(9223372036854775807) }}", "a width of"),
        ("{{ 'a\\nb'|indent(1048577) }}", "a width of 1048577"),
        ("{{ 'a'.ljust(9, 'xy') }}", "one character"),
        ("{{ 'a'.rjust(9, '') }}", "one character"),
        ("{{ 'a'.zfill(9, 'x') }}", "too many arguments"),
        ("{{ 'a'.split(',', 99999999999999999999) }}", ""),
    ] {
        assert!(refused(source).contains(problem), "{source}");
    }
    Ok(())
}

#[test]
fn json_may_be_ascii() -> Result<()> {
    assert_printed(&[
        (
            "{{ {'é': '😀a\\x7f\\n'}|tojson(ensure_ascii=true) }}",
            r#"{"\u00e9": "\ud83d\ude00a\u007f\n"}"#,
        ),
        ("{{ 'é'|tojson(ensure_ascii=false) }} {{ 'é'|tojson }}", "\"é\" \"é\""),
    ])
}
