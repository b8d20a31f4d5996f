//! A picture of a run on a terminal of any size. Colours are the terminal's own, and nothing is told by
//! colour alone.

use longdraft_decode::Origin;
use longdraft_report::words::{self, clock};
use longdraft_report::{Left, Live, Phase, Pulse, Stand};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Axis, Block, Borders, Chart, Dataset, GraphType, LineGauge, Paragraph, Wrap,
};

/// Columns from which things stand side by side.
const WIDE: u16 = 72;
/// Rows of a chart, of the bars by position, and of an answer, from which they are worth showing.
const CHART: u16 = 6;
const POSITIONS: u16 = 4;
/// Positions that are shown at most.
const MOST_POSITIONS: usize = 8;
const HALVES: [Constraint; 2] = [Constraint::Ratio(1, 2); 2];
/// Keys, as the last line tells them.
const KEYS: &str = "q stop (the same command goes on)  p plain lines  Ctrl-Z suspend";

/// Draws the whole picture; `said` are the last lines that were printed.
pub(super) fn draw(frame: &mut Frame<'_>, live: &Live, said: &[String]) {
    let area = frame.area();
    let said_rows = if area.height >= 14 { said.len() as u16 } else { 0 };
    let [title, phases, work, figures, body, lines, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(phase_rows(live, area.width)),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(said_rows),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(title_line(live, area.width), title);
    frame.render_widget(Paragraph::new(phases_line(live)).wrap(Wrap { trim: true }), phases);
    draw_work(frame, live, work);
    frame.render_widget(Paragraph::new(figures_line(live)), figures);
    draw_body(frame, live, body);
    let said: Vec<Line<'_>> = said.iter().map(|line| Line::from(clean(line)).dim()).collect();
    frame.render_widget(Paragraph::new(said), lines);
    frame.render_widget(Line::from(KEYS).dim(), keys);
}

/// The run on the left; on the right what is left, or why it does not go on.
fn title_line(live: &Live, width: u16) -> Paragraph<'static> {
    let name = clean(&live.name);
    let right = match (live.pulse, live.left) {
        (Pulse::Running, Some(left)) => left_in_words(left),
        (Pulse::Running, None) => String::new(),
        (Pulse::Finished, _) => "finished".to_owned(),
        _ => live.pulse_in_words(),
    };
    let left = format!("longdraft  {name}");
    let used = left.chars().count() + right.chars().count();
    let gap = usize::from(width).saturating_sub(used).max(2);
    let spans = [
        Span::from("longdraft  ").dim(),
        Span::from(name).bold(),
        Span::from(" ".repeat(gap)),
        Span::from(right).cyan(),
    ];
    Paragraph::new(Line::from_iter(spans))
}

fn left_in_words(left: Left) -> String {
    format!("{} left ({})", words::about(left.seconds), left.range_in_words())
}

fn phase_text(phase: &Phase) -> String {
    let mark = match phase.stand {
        Stand::Done => "✓",
        Stand::Now => "▶",
        Stand::ToCome => "·",
    };
    let time = match (phase.stand, phase.spent, phase.planned) {
        (Stand::Done, Some(spent), _) | (Stand::Now, Some(spent), None) => clock(spent),
        (Stand::Now, Some(spent), Some(planned)) => {
            format!("{}/{}", clock(spent), words::about(planned))
        }
        (_, _, Some(planned)) => words::about(planned),
        _ => String::new(),
    };
    format!("{mark} {} {time}", phase.name).trim_end().to_owned()
}

fn phases_line(live: &Live) -> Line<'static> {
    let mut spans = Vec::new();
    for phase in &live.phases {
        if !spans.is_empty() {
            spans.push(Span::from("  "));
        }
        let style = match phase.stand {
            Stand::Done => Style::new().fg(Color::Green),
            Stand::Now => Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD),
            Stand::ToCome => Style::new().add_modifier(Modifier::DIM),
        };
        // A phase stays on one line.
        spans.push(Span::styled(phase_text(phase).replace(' ', "\u{a0}"), style));
    }
    Line::from(spans)
}

/// Two where the phases need them.
fn phase_rows(live: &Live, width: u16) -> u16 {
    let letters: usize =
        live.phases.iter().map(|phase| phase_text(phase).chars().count() + 2).sum();
    if letters > usize::from(width) + 2 { 2 } else { 1 }
}

fn draw_work(frame: &mut Frame<'_>, live: &Live, area: Rect) {
    let Some(work) = &live.work else { return };
    let phase = live.left_of_phase.map_or(String::new(), |left| {
        format!(", {} left in this phase", words::about(left.seconds))
    });
    let text = format!("{}{phase}", clean(&words::work(work)));
    if work.all == 0 {
        frame.render_widget(Line::from(text), area);
        return;
    }
    let gauge = LineGauge::default()
        .ratio(work.share())
        .label(text)
        .filled_symbol("━")
        .unfilled_symbol("─")
        .filled_style(Style::new().fg(Color::Cyan))
        .unfilled_style(Style::new().add_modifier(Modifier::DIM));
    frame.render_widget(gauge, area);
}

fn figures_line(live: &Live) -> Line<'static> {
    let mut parts = Vec::new();
    parts.extend(live.speed.map(words::speed));
    parts.extend(live.memory_mib.map(words::memory));
    parts.extend(live.loss.last().map(|(_, loss)| format!("loss {loss:.3}")));
    parts.extend(live.length.last().map(|(_, length)| format!("length {length:.2}")));
    parts.extend(live.expected.map(|(tau, speed_up)| {
        format!(
            "expected x {:.2} ({:.2} to {:.2}), tau {:.2}",
            speed_up.middle, speed_up.low, speed_up.high, tau.middle
        )
    }));
    Line::from(parts.join("   "))
}

/// The answer while answers are written, curves while the draft is trained; both where there is room.
fn draw_body(frame: &mut Frame<'_>, live: &Live, area: Rect) {
    let has_curves = live.loss.len() > 1;
    match (has_curves, live.answer.is_some()) {
        (true, false) => draw_training(frame, live, area),
        (true, true) if area.height >= 2 * CHART => {
            let [above, below] = Layout::vertical(HALVES).areas(area);
            draw_answer(frame, live, above);
            draw_training(frame, live, below);
        }
        (_, true) => draw_answer(frame, live, area),
        (false, false) => {}
    }
}

fn draw_training(frame: &mut Frame<'_>, live: &Live, area: Rect) {
    if area.height < CHART {
        return;
    }
    let bars = live.positions.len().min(MOST_POSITIONS) as u16;
    let below = if bars > 0 && area.height >= CHART + POSITIONS {
        (bars + 1).min(area.height - CHART)
    } else {
        0
    };
    let [charts, positions] =
        Layout::vertical([Constraint::Min(CHART), Constraint::Length(below)]).areas(area);
    if area.width >= WIDE {
        let [left, right] = Layout::horizontal(HALVES).areas(charts);
        draw_curve(frame, "loss", &live.loss, left);
        draw_curve(frame, "simulated accept length", &live.length, right);
    } else if charts.height >= 2 * CHART {
        let [above, under] = Layout::vertical(HALVES).areas(charts);
        draw_curve(frame, "loss", &live.loss, above);
        draw_curve(frame, "simulated accept length", &live.length, under);
    } else {
        draw_curve(frame, "loss", &live.loss, charts);
    }
    draw_positions(frame, live, positions);
}

fn draw_curve(frame: &mut Frame<'_>, title: &str, points: &[(f64, f64)], area: Rect) {
    let block = Block::new().borders(Borders::TOP).title(format!(" {title} "));
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        frame.render_widget(block, area);
        return;
    };
    let low = points.iter().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let high = points.iter().map(|point| point.1).fold(f64::NEG_INFINITY, f64::max);
    let high = if high > low { high } else { low + 1e-3 };
    let data = Dataset::default()
        .marker(Marker::Braille)
        .graph_type(GraphType::Line)
        .style(Style::new().fg(Color::Cyan))
        .data(points);
    let label = |value: f64| Span::from(format!("{value:.2}"));
    let step = |value: f64| Span::from(format!("{value:.0}"));
    let chart = Chart::new(vec![data])
        .block(block)
        .x_axis(Axis::default().bounds([first.0, last.0]).labels([step(first.0), step(last.0)]))
        .y_axis(Axis::default().bounds([low, high]).labels([label(low), label(high)]));
    frame.render_widget(chart, area);
}

/// A bar a position.
fn draw_positions(frame: &mut Frame<'_>, live: &Live, area: Rect) {
    let rows = if live.positions_are_held_out { "held-out rows" } else { "training rows" };
    let block =
        Block::new().borders(Borders::TOP).title(format!(" agreement by position, {rows} "));
    let wide = usize::from(area.width.saturating_sub(12)).min(60);
    let bar = |(index, rate): (usize, &f64)| {
        let cells = (rate.clamp(0.0, 1.0) * wide as f64).round() as usize;
        Line::from_iter([
            Span::from(format!("{:>2} ", index + 1)),
            Span::from("█".repeat(cells)).cyan(),
            Span::from(format!(" {:.1} %", 100.0 * rate)),
        ])
    };
    let shown = live.positions.iter().take(MOST_POSITIONS).enumerate();
    frame.render_widget(Paragraph::new(shown.map(bar).collect::<Vec<_>>()).block(block), area);
}

/// The end of the answer that is being written; accepted proposals are underlined.
fn draw_answer(frame: &mut Frame<'_>, live: &Live, area: Rect) {
    let Some(answer) = &live.answer else { return };
    let has = |origin| answer.tokens.iter().any(|token| token.proposed_by == Some(origin));
    let mut title = " being written".to_owned();
    if has(Origin::Lookup) {
        title.push_str("; underlined: found by lookup and accepted");
    }
    if has(Origin::Draft) {
        title.push_str("; bold: proposed by the draft and accepted");
    }
    title.push(' ');
    let block = Block::new().borders(Borders::TOP).title(title);
    let mut lines = vec![Line::default()];
    lines[0].spans.push(Span::from(format!("{} ", clean(&answer.prompt.replace('\n', " ")))).dim());
    lines.push(Line::default());
    for token in &answer.tokens {
        let style = match token.proposed_by {
            Some(Origin::Lookup) => {
                Style::new().fg(Color::Green).add_modifier(Modifier::UNDERLINED)
            }
            Some(Origin::Draft) => Style::new().fg(Color::Green).add_modifier(Modifier::BOLD),
            Some(Origin::Grammar) | None => Style::new(),
        };
        for (index, part) in token.text.split('\n').enumerate() {
            if index > 0 {
                lines.push(Line::default());
            }
            if let (Some(line), false) = (lines.last_mut(), part.is_empty()) {
                line.spans.push(Span::styled(clean(part), style));
            }
        }
    }
    let rows: usize =
        lines.iter().map(|line| line.width() / usize::from(area.width.max(1)) + 1).sum();
    let hidden = rows.saturating_sub(usize::from(area.height.saturating_sub(1)));
    let text = Paragraph::new(lines).wrap(Wrap { trim: false }).block(block);
    frame.render_widget(text.scroll((hidden.min(usize::from(u16::MAX)) as u16, 0)), area);
}

/// Without what moves the cursor or turns the direction of text: a run's names and answers are anybody's.
fn clean(text: &str) -> String {
    let turns = |letter: char| matches!(letter, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let shown = text.chars().filter(|letter| !turns(*letter));
    shown.map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

#[cfg(test)]
mod tests;
