//! Parquet files of columns, which table tools read, from pandas and DuckDB to Spark.
//!
//! Pages are compressed with Snappy, which all these tools support. Any cell may be missing.
//! Integers are signed, because many tools mishandle differences of unsigned ones. Rows are written
//! group by group.

use crate::columns::{Cells, Column};
use parquet::basic::{Compression, ConvertedType, LogicalType, Repetition, Type as Physical};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::Result;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::types::{PrimitiveTypeBuilder, Type, TypePtr};
use std::io::Write;
use std::sync::Arc;

/// A Parquet file being written.
pub struct ParquetFile<W: Write + Send> {
    writer: SerializedFileWriter<W>,
}

impl<W: Write + Send> ParquetFile<W> {
    /// Makes a file with these columns and with `facts` about it, as names and values.
    pub fn new(to: W, columns: &[Column], facts: &[(&str, String)]) -> std::io::Result<ParquetFile<W>> {
        let facts = facts.iter().map(|(name, value)| KeyValue::new((*name).to_owned(), value.clone()));
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_created_by(format!("foliomem {}", env!("CARGO_PKG_VERSION")))
            .set_key_value_metadata(Some(facts.collect()))
            .build();
        let create = || {
            let fields = columns.iter().map(field).collect::<Result<Vec<_>>>()?;
            let schema = Type::group_type_builder("schema").with_fields(fields).build()?;
            SerializedFileWriter::new(to, Arc::new(schema), Arc::new(properties))
        };
        Ok(ParquetFile { writer: create().map_err(std::io::Error::other)? })
    }

    /// Appends rows. The columns must be those of the file.
    pub fn write(&mut self, columns: &[Column]) -> std::io::Result<()> {
        let mut write = || {
            let mut group = self.writer.next_row_group()?;
            for column in columns {
                let Some(writer) = group.next_column()? else {
                    unreachable!("{} is a column of the file", column.name)
                };
                write_cells(writer, &column.cells)?;
            }
            group.close()
        };
        write().map(drop).map_err(std::io::Error::other)
    }

    /// Finishes the file.
    pub fn finish(self) -> std::io::Result<()> {
        self.writer.close().map(drop).map_err(std::io::Error::other)
    }
}

fn primitive(name: &str, physical: Physical, logical: Option<LogicalType>) -> PrimitiveTypeBuilder<'_> {
    Type::primitive_type_builder(name, physical).with_repetition(Repetition::OPTIONAL).with_logical_type(logical)
}

fn field(column: &Column) -> Result<TypePtr> {
    let name = &column.name;
    let field = match column.cells {
        Cells::Integers(_) => primitive(name, Physical::INT64, None).build(),
        Cells::Floats(_) => primitive(name, Physical::DOUBLE, None).build(),
        Cells::Flags(_) => primitive(name, Physical::BOOLEAN, None).build(),
        Cells::Texts(_) => primitive(name, Physical::BYTE_ARRAY, Some(LogicalType::String)).build(),
        Cells::Lists(_) => {
            let required = Repetition::REQUIRED;
            let element = primitive("element", Physical::INT64, None).with_repetition(required).build()?;
            let list = Type::group_type_builder("list").with_repetition(Repetition::REPEATED);
            let list = list.with_fields(vec![Arc::new(element)]).build()?;
            let group = Type::group_type_builder(name).with_repetition(required);
            let group = group.with_logical_type(Some(LogicalType::List)).with_converted_type(ConvertedType::LIST);
            group.with_fields(vec![Arc::new(list)]).build()
        }
    };
    field.map(Arc::new)
}

fn write_cells(writer: SerializedColumnWriter, cells: &Cells) -> Result<()> {
    match cells {
        Cells::Integers(cells) => write_optional::<Int64Type, _>(writer, cells, |&cell| cell),
        Cells::Floats(cells) => write_optional::<DoubleType, _>(writer, cells, |&cell| cell),
        Cells::Flags(cells) => write_optional::<BoolType, _>(writer, cells, |&cell| cell),
        Cells::Texts(cells) => write_optional::<ByteArrayType, _>(writer, cells, |cell| ByteArray::from(cell.as_str())),
        Cells::Lists(lists) => write_lists(writer, lists),
    }
}

fn write_optional<T: DataType, C>(
    mut writer: SerializedColumnWriter,
    cells: &[Option<C>],
    value: impl Fn(&C) -> T::T,
) -> Result<()> {
    let values: Vec<T::T> = cells.iter().flatten().map(value).collect();
    // 1 for each present cell.
    let definition_levels: Vec<i16> = cells.iter().map(|cell| i16::from(cell.is_some())).collect();
    writer.typed::<T>().write_batch(&values, Some(&definition_levels), None)?;
    writer.close()
}

fn write_lists(mut writer: SerializedColumnWriter, lists: &[Vec<i64>]) -> Result<()> {
    // An empty list has one pair of levels and no value. All elements but the first continue a
    // list.
    let definition_levels: Vec<i16> =
        lists.iter().flat_map(|list| vec![i16::from(!list.is_empty()); list.len().max(1)]).collect();
    let repetition_levels: Vec<i16> =
        lists.iter().flat_map(|list| (0..list.len().max(1)).map(|at| i16::from(at > 0))).collect();
    writer.typed::<Int64Type>().write_batch(&lists.concat(), Some(&definition_levels), Some(&repetition_levels))?;
    writer.close()
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::Field;
    use proptest::prelude::*;

    fn columns(rows: usize) -> impl Strategy<Value = Vec<Column>> {
        use prop::collection::vec;
        let cells = (
            vec(any::<Option<i64>>(), rows),
            vec(prop::option::of(-1e300..1e300), rows),
            vec(any::<Option<bool>>(), rows),
            vec(any::<Option<String>>(), rows),
            vec(vec(any::<i64>(), 0..4), rows),
        );
        cells.prop_map(|(integers, floats, flags, texts, lists)| {
            let column = |name: &str, cells| Column { name: name.to_owned(), cells };
            vec![
                column("swap.size_mib", Cells::Integers(integers)),
                column("seconds", Cells::Floats(floats)),
                column("flag", Cells::Flags(flags)),
                column("text", Cells::Texts(texts)),
                column("lists", Cells::Lists(lists)),
            ]
        })
    }

    /// Returns the fields of a row's cell: one field, or the elements of a list.
    fn cell(cells: &Cells, row: usize) -> Vec<Field> {
        let or_null = |field: Option<Field>| vec![field.unwrap_or(Field::Null)];
        match cells {
            Cells::Integers(cells) => or_null(cells[row].map(Field::Long)),
            Cells::Floats(cells) => or_null(cells[row].map(Field::Double)),
            Cells::Flags(cells) => or_null(cells[row].map(Field::Bool)),
            Cells::Texts(cells) => or_null(cells[row].clone().map(Field::Str)),
            Cells::Lists(cells) => cells[row].iter().map(|&element| Field::Long(element)).collect(),
        }
    }

    fn found(field: Field) -> Vec<Field> {
        match field {
            Field::ListInternal(list) => list.elements().to_vec(),
            field => vec![field],
        }
    }

    proptest! {
        #[test]
        fn written_rows_are_read_back(groups in prop::collection::vec((0usize..20).prop_flat_map(columns), 1..4)) {
            let mut bytes = Vec::new();
            let mut file = ParquetFile::new(&mut bytes, &groups[0], &[("page_bytes", "4096".to_owned())]).unwrap();
            groups.iter().for_each(|columns| file.write(columns).unwrap());
            file.finish().unwrap();
            let reader = SerializedFileReader::new(bytes::Bytes::from(bytes)).unwrap();
            let facts = reader.metadata().file_metadata().key_value_metadata().unwrap();
            prop_assert!(facts.contains(&KeyValue::new("page_bytes".to_owned(), "4096".to_owned())));
            let mut rows = reader.get_row_iter(None).unwrap();
            for columns in &groups {
                let Cells::Flags(flags) = &columns[2].cells else { unreachable!() };
                for row in 0..flags.len() {
                    let row_found = rows.next().unwrap().unwrap();
                    for ((name, field), column) in row_found.into_columns().into_iter().zip(columns) {
                        prop_assert_eq!((&name, found(field)), (&column.name, cell(&column.cells, row)));
                    }
                }
            }
            prop_assert!(rows.next().is_none());
        }
    }
}
