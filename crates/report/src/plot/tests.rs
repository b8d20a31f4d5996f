use super::*;
use crate::axes::Place;

const AXES: [TrainingAxis; 3] = [TrainingAxis::Tokens, TrainingAxis::Steps, TrainingAxis::Time];

/// Ten minutes and a thousand tokens a step.
fn place(step: f64) -> Place {
    Place { tokens: 1000.0 * step, steps: step, seconds: 600.0 * step }
}

fn chart(scale: Scale, ys: &[f64]) -> Chart {
    let segment =
        ys.iter().enumerate().map(|(i, y)| Point { at: place(i as f64), y: *y }).collect();
    Chart {
        across: Horizontal::Training,
        y_title: "loss <nats>".into(),
        scale,
        curves: vec![Curve {
            label: "a".into(),
            ink: Ink::Series(1),
            style: Style::Line,
            segments: vec![segment],
        }],
        marks: vec![Mark { at: place(0.0), label: "</svg><script>".into() }],
        line_at: None,
    }
}

#[test]
fn labels_are_escaped_and_curves_are_in_the_frame() {
    let drawing = draw("<b>&", &chart(Scale::Fitting, &[3.0, 2.0, 1.0]), &AXES).expect("drawn");
    let svg = drawing.svg;
    assert!(!svg.contains("<script") && svg.contains("&lt;script&gt;"), "{svg}");
    assert!(svg.contains("<title>&lt;b&gt;&amp;</title>") && !svg.contains("://"), "{svg}");
    assert_eq!(drawing.values["curves"][0]["points"][1], json!([2, 1000, 1, 10]));
    assert!(svg.contains("loss &lt;nats&gt;"));
    let curves = svg.lines().filter(|line| line.contains("#D55E00"));
    let ends: Vec<(i32, i32)> = curves.map(end_of_line).collect();
    // The last point lies at the right edge, whatever the axis.
    assert_eq!((ends.len(), ends[0]), (3, ends[2]));
    let frame = drawing.values["frame"].as_array().expect("a frame");
    let frame: Vec<i64> = frame.iter().filter_map(Value::as_i64).collect();
    assert!((frame[2] - 2..=frame[2]).contains(&i64::from(ends[0].0)), "{ends:?} {frame:?}");
    assert!((frame[1]..=frame[3]).contains(&i64::from(ends[0].1)), "{ends:?} {frame:?}");
}

/// Where a line of `d="Mx yl..."` ends.
fn end_of_line(path: &str) -> (i32, i32) {
    let data = path.split(" d=\"M").nth(1).and_then(|rest| rest.split('"').next());
    let data = data.expect("a path").replace('l', " ").replace('-', " -");
    let numbers: Vec<i32> =
        data.split_whitespace().map(|number| number.parse().expect("a number")).collect();
    numbers.chunks(2).fold((0, 0), |end, step| (end.0 + step[0], end.1 + step[1]))
}

#[test]
fn every_axis_of_training_has_a_group_with_its_unit() {
    let drawing = draw("x", &chart(Scale::Fitting, &[3.0, 2.0, 1.0]), &AXES).expect("drawn");
    let groups: Vec<&str> = drawing.svg.split("<g class=\"by-").collect();
    assert_eq!(groups.len(), 4);
    for (group, words) in groups.iter().zip([
        "loss &lt;nats&gt;",
        "training tokens",
        "optimizer steps",
        "minutes in steps",
    ]) {
        assert!(group.contains(&format!("\n{words}\n")), "{words} not in {group}");
    }
    assert!(groups[0].contains("\n3\n") && !groups[3].contains("\n3\n"), "one vertical axis");
    let ranges: Vec<&Value> =
        drawing.values["x"].as_array().expect("axes").iter().map(|x| &x["range"]).collect();
    assert_eq!(ranges, [&json!([0.0, 2000.0]), &json!([0.0, 2.0]), &json!([0.0, 20.0])]);
}

#[test]
fn what_is_not_over_training_is_drawn_once() {
    let mut chart = chart(Scale::Fitting, &[3.0, 2.0]);
    chart.across = Horizontal::Counts("draft position");
    chart.marks.clear();
    chart.curves[0].segments[0].iter_mut().zip([1.0, 2.0]).for_each(|(point, x)| {
        point.at = Place::fixed(x);
    });
    let drawing = draw("x", &chart, &AXES).expect("drawn");
    assert!(drawing.svg.contains("<g>") && !drawing.svg.contains("<g class"));
    assert_eq!(drawing.values["curves"][0]["points"], json!([[3, 1], [2, 2]]));
}

#[test]
fn marks_at_one_place_share_a_line_on_that_axis_alone() {
    let mut chart = chart(Scale::Fitting, &[3.0, 2.0]);
    let mark = |tokens, steps, label: &str| Mark {
        at: Place { tokens, steps, seconds: steps },
        label: label.into(),
    };
    chart.marks = vec![mark(500.0, 5.0, "b"), mark(500.0, 4.0, "a"), mark(500.0, 5.0, "b")];
    let on = |axis| merged(&chart.marks, &chart.x_axis(axis));
    assert_eq!(on(TrainingAxis::Tokens), [(500.0, "b · a".to_owned())]);
    assert_eq!(on(TrainingAxis::Steps), [(4.0, "a".to_owned()), (5.0, "b".to_owned())]);
}

#[test]
fn odd_ranges_are_drawn_without_a_panic() {
    for scale in [Scale::Fitting, Scale::FromZero, Scale::Share] {
        for ys in [&[0.0][..], &[1.0, 1.0], &[-5.0, 5.0], &[1e-300, 1e300], &[f64::MAX]] {
            draw("odd", &chart(scale, ys), &AXES).expect("drawn");
        }
    }
}

#[test]
fn every_stage_is_named_however_short() {
    let mut chart = chart(Scale::Fitting, &[3.0, 2.0, 1.0]);
    let places = [(0.0, "base"), (1000.0, "long"), (1001.0, "reasoning"), (1999.0, "last one")];
    chart.marks =
        places.map(|(x, label)| Mark { at: place(x / 1000.0), label: label.into() }).into();
    let svg = draw("stages", &chart, &AXES[..1]).expect("drawn").svg;
    let mut heights = Vec::new();
    for (_, label) in places {
        let at = svg.find(&format!("\n{label}\n")).expect(label);
        let text = &svg[svg[..at].rfind("<text").expect("a text")..at];
        heights.push(text.split(" y=\"").nth(1).and_then(|y| y.split('"').next()));
    }
    assert_ne!(heights[1], heights[2], "names that would meet stand one below the other");
}
