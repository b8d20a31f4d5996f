//! Slices, division, powers, tuples and loops over texts; what is wanted was printed by Jinja2 3.1.

use super::*;

#[test]
fn slices_go_backwards_as_in_python() -> Result<()> {
    assert_printed(&[
        (
            "{{ ''[::-1] }}|{{ 'abc'[::-1] }} {{ 'abcde'[3:0:-2] }} {{ 'abc'[2:0:-1] }}",
            "|cba db cb",
        ),
        ("{{ [1, 2, 3][::-1] }} {{ [][::-1] }} {{ 'aé日'[::-1] }}", "[3, 2, 1] [] 日éa"),
        ("{{ 'abc'[-1::-1] }} {{ 'abc'[5::-1] }} {{ 'abc'[:-3:-1] }}", "cba cba cb"),
        ("{{ 'abc'[-9::-1] }}|{{ 'abc'[:-9:-1] }} {{ 'abc'[1:2:-1] }}|", "|cba |"),
        ("{{ 'abcdef'[::2] }} {{ 'abcdef'[-4:-1:2] }} {{ 'abc'[2:1] }}|", "ace ce |"),
        (
            "{% set d = {'a': {'b': [1, 2, 3]}} %}{% for x in d.a['b'][::-1] %}{{ x }}{% endfor %} \
             {{ d.a.b[::-1][0] ~ d.a.b[::-2] }} {{ -d.a.b[::-1][1] }} {{ d.a.b[1:][::-1]|join('-') }}",
            "321 3[3, 1] -2 3-2",
        ),
        (
            "{{ 'a b'.split(' ')[::-1] }} {{ (1, 2, 3)[::-1] }} {{ 'x' in 'xy'[::-1] }}",
            "['b', 'a'] (3, 2, 1) True",
        ),
    ])?;
    assert!(refused("{{ 'abc'[::0] }}").contains("steps of 0"));
    Ok(())
}

#[test]
fn division_is_floored_and_powers_may_be_fractions() -> Result<()> {
    assert_printed(&[
        ("{{ 7 // -2 }} {{ -7 // 2 }} {{ -7 // -2 }} {{ true // 2 }}", "-4 -4 3 0"),
        ("{{ 7.5 // -2 }} {{ -7.5 // 2 }} {{ 7 // 2.0 }} {{ 0.0 // -3 }}", "-4.0 -4.0 3.0 -0.0"),
        ("{{ 3 * 7 // 2 % 4 }} {{ 17 // 5 // 2 }} {{ 2 ** 10 // 3 }}", "2 1 341"),
        ("{{ 2 ** -1 }} {{ 2.0 ** 2 }} {{ 4 ** 0.5 }} {{ 0 ** 0 }}", "0.5 4.0 2.0 1"),
        ("{{ 2 ** 3 ** 2 }} {{ -2 ** 2 }} {{ -8 ** 3 }} {{ true ** 2 }}", "64 4 -512 1"),
        (
            "{{ 2 * 3 ** 2 ~ 'x' }} {{ [2 ** 2, 7 // 2] }} {{ dict(**{'a': 2 ** 3}) }}",
            "18x [4, 3] {'a': 8}",
        ),
        ("{% for x in [1] %}{{ loop.index // 2 }}{{ loop.index ** 2 }}{% endfor %}", "01"),
    ])?;
    for (source, sign) in [
        ("{{ 1 // 0 }}", "`//`"),
        ("{{ 1.0 // 0 }}", "`//`"),
        ("{{ none // 2 }}", "`//`"),
        ("{{ 0 ** -1 }}", "`**`"),
        ("{{ 10 ** 99999 }}", "`**`"),
        ("{{ 'a' ** 2 }}", "`**`"),
    ] {
        assert!(refused(source).contains(sign), "{source}");
    }
    Ok(())
}

#[test]
fn a_sign_is_of_the_part_that_is_taken() -> Result<()> {
    assert_printed(&[
        ("{% for x in [1] %}{{ -loop.index }} {{ -x }} {{ 3 - -x }}{% endfor %}", "-1 -1 4"),
        (
            "{{ -{'a': [2]}.a[0] }} {{ -[1.5][0]|abs }} {{ -1|abs }} {{ 3 - -{'a': 2}.a }}",
            "-2 1.5 1 5",
        ),
        (
            "{{ -'abc'.find('c') * 2 }} {{ -{'a': 2}.a ** 2 }} {{ -{'is': 2}.is is even }}",
            "-4 4 True",
        ),
        ("{{ 1 if {'is': 2}.is else 7 ~ 'x' }} {{ {'is': 0}.is or 7 ~ 'x' }}", "1 7x"),
    ])
}

#[test]
fn loops_over_texts_know_their_length() -> Result<()> {
    assert_printed(&[
        (
            "{% for c in 'aé日' %}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.last }}{{ c }} \
             {% endfor %}",
            "332Falsea 321Falseé 310True日 ",
        ),
        (
            "{% for c in 'abc' if c != 'b' %}{{ loop.length }}{{ loop.last }}{{ c }}{{ loop.previtem }}\
             {{ loop.nextitem }} {% endfor %}",
            "2Falseac 2Trueca ",
        ),
        ("{% for c in '' %}x{% else %}none{% endfor %}", "none"),
        ("{% for x in 1, 2 %}{{ x }}{{ loop.length }}{% endfor %}", "1222"),
        (
            "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}\
             {{ loop.depth0 }}{% endif %}{% endfor %}",
            "102132",
        ),
        ("{% for x in {'if': [1, 2]}.if if x > 1 %}{{ x }}{% endfor %}", "2"),
        (
            "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{{ loop.length }}{% endfor %}",
            "a12b22",
        ),
    ])
}

#[test]
fn tuples_are_printed_in_round_brackets() -> Result<()> {
    assert_printed(&[
        ("{{ (1, 2) }} {{ (1,) }} {{ () }} {{ (1) }}", "(1, 2) (1,) () 1"),
        (
            "{{ ((1, 'a'), [2]) }} {{ ('a', 'b') ~ '' }} {{ (1 ~ 2, 3) }}",
            "((1, 'a'), [2]) ('a', 'b') ('12', 3)",
        ),
        ("{{ (1, 2)|list }} {{ (1, 2)|string }} {{ (1, 2)|tojson }}", "[1, 2] (1, 2) [1, 2]"),
        (
            "{{ (1, 2)[0] }} {{ (1, 2)[-1] }} {{ (1, 2)|length }} {{ (1, 2) == (1, 2) }} {{ 3 in (1, 3) }}",
            "1 2 2 True True",
        ),
        ("{{ {'a': 1}.items()|list }} {{ {'a': 1}|items|list }}", "[('a', 1)] [('a', 1)]"),
        ("{% for i in {'a': 1}.items() %}{{ i }}{% endfor %}", "('a', 1)"),
        ("{{ {'b': 1, 'a': 2}|dictsort }} {{ missing|items|list }}", "[('a', 2), ('b', 1)] []"),
        (
            "{% for k, v in {'b': 1, 'a': 2}|dictsort(false, 'value') %}{{ k }}{% endfor %}\
             {% for k, v in {'b': 1, 'a': 2}|dictsort(reverse=true) %}{{ k }}{{ v }}{% endfor %}",
            "bab1a2",
        ),
        (
            "{% set (a, b) = (1, 2) %}{{ a }}{{ b }} {% for (a, b) in [(3, 4)] %}{{ a }}{{ b }}{% endfor %}",
            "12 34",
        ),
        (
            "{{ (1, 2) is sequence }} {{ (1, 2) is iterable }} {{ (1, 2) is mapping }}",
            "True True False",
        ),
        ("{{ 'abc'.startswith(('a', 'x')) }} {{ dict(a=(1, 2)) }}", "True {'a': (1, 2)}"),
        (
            "{{ [(1, 2), (3, 4)]|map('first')|list }} {{ [(2, 1), (1, 2)]|sort }}",
            "[1, 3] [(1, 2), (2, 1)]",
        ),
        (
            "{{ '%s-%s' % (1, 2) }} {% set t = (1, 2) %}{{ '%s-%s' % t }} {{ '%s' % ((1, 2)|string) }}",
            "1-2 1-2 (1, 2)",
        ),
        ("{% set t = ('a',) %}{{ '%s' % t }} {{ '%s'|format(t) }}", "a ('a',)"),
        (
            "{{ '%s' % ((1, 2),) }} {{ '%s %s' % ((1, 2), [3]) }} {{ '100%%' % () }}",
            "(1, 2) (1, 2) [3] 100%",
        ),
        (
            "{% macro m(x) %}{{ caller(1, 2) }}{% endmacro %}{% call(a, b) m((3, 4)) %}{{ a }}{{ b }}{% endcall %}",
            "12",
        ),
    ])
}

#[test]
fn names_in_brackets_are_no_tuples() -> Result<()> {
    assert_printed(&[
        ("{% for (i, (k, v)) in [(1, (2, 3))] %}{{ i }}{{ k }}{{ v }}{% endfor %}", "123"),
        (
            "{% set ((a, b), c) = ((1, 2), 3) %}{{ a }}{{ b }}{{ c }} \
             {% set a, (b, c) = 4, (5, 6) %}{{ a }}{{ b }}{{ c }}",
            "123 456",
        ),
        (
            "{% with (a, b) = (1, 2), c = (3, 4), (d, e) = (5, 6) %}{{ a }}{{ b }}{{ c }}{{ d }}{{ e }}\
             {% endwith %}",
            "12(3, 4)56",
        ),
    ])
}

#[test]
fn a_value_may_have_any_number_of_slices() {
    let source = format!("{{{{ x{} }}}}", "[::1]".repeat(50_000));
    assert_eq!(rewritten::rewritten(&source).matches("sliced").count(), 50_000);
}

#[test]
fn constructs_of_published_templates_print_what_they_do_in_jinja() -> Result<()> {
    assert_printed(&[
        (
            "{%- set ns = namespace(a=1, b=[]) -%}{% set ns.a = ns.a + 1 %}{{ ns.a }} {{ ns.b }}",
            "2 []",
        ),
        (
            "{{ [{'a': 1, 'b': 'x'}, {'a': 2}]|selectattr('a', 'equalto', 1)|list }} \
             {{ [{'a': none}, {'a': 2}]|rejectattr('a', 'none')|list }}",
            "[{'a': 1, 'b': 'x'}] [{'a': 2}]",
        ),
        (
            "{{ [{'a': 1}, {'b': 2}]|map(attribute='a', default='d')|list }} \
             {{ [{'a': {'b': 1}}]|map(attribute='a.b')|list }} {{ ['a', 'b']|map('upper')|join(',') }}",
            "[1, 'd'] [1] A,B",
        ),
        (
            "{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{{ loop.cycle('a', 'b') }}{{ loop.depth }}\
             {{ loop.first }}{% endfor %}",
            "Truea1TrueFalseb1FalseTruea1False",
        ),
        ("a  {%+ if true %}b{% endif +%}   c", "a  b   c"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{% for x in [] %}{%- else %} none {%- endfor %}", " none"),
        (
            "{{ 'abc' if false }}|{{ 1 < 2 < 3 }} {{ 'a' not in 'b' }} {{ 3 is divisibleby 3 }}",
            "|True True True",
        ),
        ("{% set x %}abc{% endset %}{{ x }} {% filter upper %}abc{% endfilter %}", "abc ABC"),
        (
            "{% for x in range(5) %}{% if x == 1 %}{% continue %}{% endif %}{% if x == 3 %}{% break %}{% endif %}\
             {{ x }}{% endfor %}",
            "02",
        ),
    ])
}
