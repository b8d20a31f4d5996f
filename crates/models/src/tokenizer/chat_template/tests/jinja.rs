//! Operators and macros as Jinja2 has them.

use super::*;

#[test]
fn what_is_joined_is_written_as_in_python() -> Result<()> {
    let tools = json!([{"a": "f", "c": [1, 1.0, true]}]);
    for (source, wanted) in [
        ("{{ 'a: ' ~ tools[0].c ~ '!' }}", "a: [1, 1.0, True]!"),
        ("{{ 1.0 ~ none ~ true ~ 3 ~ {'a': [1, 'x']} ~ missing }}", "1.0NoneTrue3{'a': [1, 'x']}"),
        ("{{ 2 * 3 ~ 1 + 1 ~ -1 }} {{ 1 ~ {'if': 2}.if + 'x' }}", "611-1 12x"),
        ("{{ -1 ~ [1] == '-1[1]' and [1] ~ 'x' in ['[1]x'] }}", "True"),
        ("{{ 'x' if not [] ~ '' else 0 }} {{ tools[0]['a' ~ ''] }}", "0 f"),
        ("{{ 3 is not none ~ 'a' }} {{ 1 is in [1] ~ 'b' }}", "Truea Trueb"),
        ("{% set x = ['a'] ~ 1e-5 %}{{ x }}", "['a']1e-05"),
        ("{% for c in 'a' ~ [1] if c != '[' %}{{ c }}{% endfor %}", "a1]"),
        (
            "{{ '}} {% ' ~ [\"it's\"] ~ \" ~ % \" }}{# ~ {{ #}{% raw %}{{ 1 ~ [2.50] }}{% endraw %}",
            "}} {% [\"it's\"] ~ % {{ 1 ~ [2.50] }}",
        ),
    ] {
        let template = ChatTemplate::new(source, Map::new())?;
        assert_eq!(template.render_messages(&[], Some(&tools), false)?, wanted, "{source}");
    }
    Ok(())
}

#[test]
fn texts_are_formatted_as_in_python() -> Result<()> {
    assert_printed(&[
        ("{{ '%s' % [1, 'a'] }} {{ '%s %d' % ('x', 2) }} {{ '%s' % ('y',) }}", "[1, 'a'] x 2 y"),
        ("{{ '%5.1f|%-4s|%03d|%%' % (2.26, 'a', 7) }} {{ '%s' % 1e-5 }}", "  2.3|a   |007|% 1e-05"),
        ("{{ '%(a)s-%(b)r' % {'a': 1, 'b': 'x'} }} {{ '%s' % 'a' ~ 'b' }}", "1-'x' ab"),
        ("{{ '%s!' % 'a' | upper }} {{ 7 % 4 }} {{ 3 * 7 % 4 }}", "A! 3 1"),
        ("{{ '%s=%r' | format('a', none) }} {{ '%(n)s' | format(n=[1]) }}", "a=None [1]"),
        ("{% for item in {'a': 1}.items() %}{{ '%s=%s' % item }}{% endfor %}", "a=1"),
        (
            "{{ '%d %d' % (3.7, -3.7) }} {{ '%05d|%i' % (2.9, 1e15) }}",
            "3 -3 00002|1000000000000000",
        ),
        ("{% set f = '%s!' %}{{ f % 'a' }} {% set f = '%s-%d' %}{{ f % ('a', 1) }}", "a! a-1"),
        (
            "{{ ('a%s') % 'b' }} {{ ('%s' ~ '!') % 'a' }} {{ '%s' '%s' % (1, 2) }} {{ '%s'|trim % 'a' }}",
            "ab a! 12 a",
        ),
        (
            "{% set f = '%s%%s' %}{{ f % 'a' % 'b' }} {{ '%s,' * 2 % (1, 2) }} \
             {{ f % 'a' * 2 % ('b', 'c') }}",
            "ab 1,2, abac",
        ),
        ("{{ '%*d|%-*s|%.*f|%*d|' % (5, 3, 4, 'a', 1, 2.26, -3, 7) }}", "    3|a   |2.3|7  |"),
        ("{% set f = '%s=%(a)s' %}{{ f[3:] % {'a': 1} }} {{ '%s' % 'x' is string }}", "1 True"),
    ])?;
    for (source, problem) in [
        ("{{ '%s %s' % 'a' }}", "fewer arguments"),
        ("{{ '%s' % ('a', 'b') }}", "more arguments"),
        ("{{ '%*d' % 3 }}", "fewer arguments"),
        ("{{ '%(a)s' % 'a' }}", "more arguments"),
        ("{{ '%' % () }}", "chat template"),
        ("{% set f = '%s' %}{{ f % ('a', 'b') }}", "more arguments"),
    ] {
        assert!(refused(source).contains(problem), "{source}");
    }
    Ok(())
}

#[test]
fn cyclers_and_joiners_take_turns() -> Result<()> {
    let source = "{% set c = cycler('x', 'y') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}\
                  {% set j = joiner('|') %}{{ j() }}a{{ j() }}b";
    assert_eq!(ChatTemplate::new(source, Map::new())?.render(&[], false)?, "xyxa|b");
    assert!(refused("{{ cycler() }}").contains("at least one"));
    Ok(())
}

#[test]
fn what_a_division_leaves_has_the_divisor_s_sign() -> Result<()> {
    assert_printed(&[
        ("{{ 7 % -3 }} {{ -7 % 3 }} {{ -7 % -3 }} {{ 6 % -3 }} {{ true % 2 }}", "-2 2 -1 0 1"),
        ("{{ 7.5 % -2 }} {{ -7.5 % 2 }} {{ -4.0 % 2 }} {{ 10 % 4.0 }}", "-0.5 0.5 0.0 2.0"),
        ("{{ 3 * 7 % 4 * 5 % 3 }} {{ 2 * 3 % 4 }} {{ 17 % 10 % 4 }}", "2 2 3"),
        ("{{ 2 ** 3 % 5 }} {{ 7 % 2 ** 2 }} {{ 9 // 2 % 3 / 2 }}", "3 3 0.5"),
        (
            "{% for i in range(4) %}{{ loop.index0 % 2 }}{{ i % 3 }}{{ loop.index % -2 }}\
             {{ loop.index0 % 2 * 3 % 2 }}{% endfor %}",
            "00-10110102-101001",
        ),
        (
            "{% set x = 3 %}{{ x ~ x % 2 }} {{ 'y' if x % 2 == 1 and not x % 3 else 'n' }} \
             {{ [x % 2, {'a': x % 2}, -x % 2] }} {{ '50%'|length % 2 }}",
            "31 y [1, {'a': 1}, 1] 1",
        ),
    ])?;
    for source in ["{{ 1 % 0 }}", "{{ 1.5 % 0 }}", "{{ none % 2 }}", "{{ 7 % (4, 5) }}"] {
        assert!(refused(source).contains("`%`"), "{source}");
    }
    Ok(())
}

#[test]
fn macros_take_more_arguments_and_call_back_as_in_jinja() -> Result<()> {
    assert_printed(&[
        (
            "{% macro m(a, b=2) %}{{ a }},{{ b }},{{ varargs }},{{ kwargs }};{% endmacro %}\n\
             {{ m(1) }}{{ m(1, 3, 4, [5]) }}{{ m(b=0, a=1, c='x') }}",
            "1,2,(),{};1,3,(4, [5]),{};1,0,(),{'c': 'x'};",
        ),
        (
            "{% macro m() %}{{ varargs | length }}{% if kwargs.deep %}{{ m(*varargs) }}{% endif %}\
             {% endmacro %}{{ m(1, 2, deep=true) }}",
            "22",
        ),
        (
            "{% macro m(x) -%} <{{ caller(x) }}> {%- endmacro %}\
             {% call(y) m(3) %}{{ y ~ [y] }}{% endcall %}",
            "<3[3]>",
        ),
        (
            "{% macro m(x) %}{% if caller %}{{ caller() }}{% else %}none{% endif %}{{ kwargs.k }}\
             {% endmacro %}{{ m(1, k=2) }}{% call m(1, k=3) %}c{% endcall %}",
            "none2c3",
        ),
        ("a\n  {%- macro m() %}{{ varargs[0] }}{% endmacro -%}\n  b{{ m('c') }}", "abc"),
        (
            "{% macro m(a, b) %}{{ varargs }}{% endmacro %}{{ m.name ~ m.arguments|join(',') }}",
            "ma,b",
        ),
        ("{% macro m(a) %}{{ kwargs }}{% endmacro %}{{ m(1, kwargs=2) }}", "{'kwargs': 2}"),
    ])?;
    for source in [
        "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
        "{% macro m(a) %}{{ kwargs }}{% endmacro %}{{ m(1, 2) }}",
        "{% macro m(a) %}{{ varargs }}{% endmacro %}{{ m(1, b=2) }}",
        "{% macro m(a) %}{{ varargs }}{% endmacro %}{{ m(1, varargs=2) }}",
        "{% macro m(varargs) %}{{ varargs }}{% endmacro %}{{ m(1, 2) }}",
    ] {
        assert!(refused(source).contains("argument"), "{source}");
    }
    Ok(())
}

#[test]
fn macros_end_where_they_do_in_jinja() -> Result<()> {
    assert_printed(&[
        (
            "{% macro f(x) %}{% macro g(y) %}{{ y }}{% endmacro %}{{ g(x) }}{{ varargs[0] }}\
             {% endmacro %}{{ f(1, 2) }}",
            "12",
        ),
        (
            "{% macro f(x) %}{% macro g() %}{{ varargs | length }}{% endmacro %}{{ g(x, 2) }}\
             {% endmacro %}{{ f(1, 2) }}",
            "2",
        ),
        ("{% macro f() %}{{ 'endmacro' }}{{ varargs[0] }}{% endmacro %}{{ f(2) }}", "endmacro2"),
        (
            "{% macro f(x) %}{# endmacro #}{% raw %}{% endmacro %}{% endraw %}{{ varargs[0] }}\
             {% endmacro %}{{ f(1, 2) }}",
            "{% endmacro %}2",
        ),
        (
            "{% macro p(x, kwargs) %}{{ x }}{{ kwargs }}{{ varargs|length }}{% endmacro %}\
             {{ p(1, 2) }}{{ p(1, 2, 3) }}",
            "120121",
        ),
        (
            "{% macro p(varargs) %}{{ varargs }}{{ kwargs.a }}{% endmacro %}\
             {{ p(1, a=2) }}{{ p(varargs=3) }}",
            "123",
        ),
    ])?;
    assert!(ChatTemplate::new("{% macro m() %}{% endmacro m %}", Map::new()).is_err());
    Ok(())
}

#[test]
fn defaults_of_macros_may_name_parameters_before_theirs() -> Result<()> {
    assert_printed(&[
        (
            "{% macro f(a, b=a, c=b ~ 'x', d=1) -%} {{ b }}{{ c }}{{ d }}{% endmacro %}\
             {{ f('q') }} {{ f('q', c=1) }} {{ f(1, 2, d=3) }}",
            "qqx1 q11 22x3",
        ),
        (
            "{% macro f(a, b=a ~ 'x') %}\n{{ b }}{{ kwargs|length }}\n{% endmacro %}{{ f('q', z=1) }}",
            "qx1\n",
        ),
        (
            "{% macro f(a, b={'a': [a]}, c=a.c) %}{{ b }}{{ c }}{% endmacro %}{{ f({'c': 'd'}) }}",
            "{'a': [{'c': 'd'}]}d",
        ),
    ])
}
